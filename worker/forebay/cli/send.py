"""`forebay send`: publish requests from JSON lines, files or images."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from forebay.cli.options import AsJson, Bootstrap, ConfigFile, SetValues, read_settings
from forebay.errors import UsageError
from forebay.wording import counted

if TYPE_CHECKING:
    from forebay.cli.documents import Form, Prepared
    from forebay.cli.sources import Verdict
    from forebay.records import Headers
    from forebay.settings import Kafka, Settings
    from forebay.stream.publish import Receipt

Paths = Annotated[
    list[str] | None,
    typer.Argument(help="Files or folders: .jsonl .ndjson .json .txt .npy .npz, images; - or none is standard input."),
]
InputName = Annotated[str, typer.Option("--input", "-i", help="The tensor's name for images, text and .npy.")]
EncodingName = Annotated[
    Literal["binary", "json"], typer.Option("--encoding", help="How tensors travel that are built here.")
]
Pixels = Annotated[
    bool, typer.Option("--pixels/--file-bytes", help="Decode images to UINT8 [1,H,W,3], or send the files as BYTES.")
]
Size = Annotated[str | None, typer.Option("--size", metavar="HxW", help="Resize decoded images.", show_default=False)]
ModelName = Annotated[
    str | None, typer.Option("--model", help="The model to ask, NAME or NAME:VERSION.", show_default=False)
]
TimeoutMs = Annotated[
    int | None, typer.Option("--timeout-ms", min=1, help="The request expires after this.", show_default=False)
]
Priority = Annotated[int | None, typer.Option("--priority", min=0, help="1 is highest.", show_default=False)]
HeaderTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--header", "-H", metavar="NAME=VALUE", help="A header of your own; 0x… is bytes.", show_default=False
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Send lines or files byte for byte, unchecked.")]


TOLD_FAILURES = 5


@dataclass(slots=True)
class Tally:
    """What became of the records sent so far."""

    sent: int = 0
    acknowledged: int = 0
    failed: int = 0
    receipts: list[tuple[str, Receipt]] = field(default_factory=list)


def make_form(
    input: str, encoding: Literal["binary", "json"], pixels: bool, size: str | None, raw: bool, headers: Headers
) -> Form:
    """Make the form of requests that the command line describes; `headers` are ready to send."""
    from forebay.cli.documents import Form
    from forebay.cli.sources import parse_size
    from forebay.wire import RequestOptions

    return Form(input, encoding, pixels, parse_size(size), raw, RequestOptions(headers=headers))


def make_headers(
    model: str | None, timeout_ms: int | None, priority: int | None, texts: Iterable[str] | None
) -> Headers:
    """Make the headers that the command line asks for, dedicated options first."""
    from forebay.cli.sources import parse_header
    from forebay_schemas import headers as names

    name, _, version = (model or "").partition(":")
    told = (
        (names.MODEL, name or None),
        (names.MODEL_VERSION, version or None),
        (names.TIMEOUT_MS, timeout_ms),
        (names.PRIORITY, priority),
    )
    headers: Headers = [(header, str(value).encode()) for header, value in told if value is not None]
    return headers + [parse_header(text) for text in texts or ()]


def identify(request: Prepared, wanted: str | None) -> tuple[str, Headers]:
    """Give a request's id and its headers: the wanted one, or its own, or a new one."""
    from forebay_schemas.headers import REQUEST_ID

    id = wanted or request.id or uuid.uuid4().hex
    return id, request.headers if id == request.id else [*request.headers, (REQUEST_ID, id.encode())]


def publish_all(
    kafka: Kafka, topic: str, requests: Iterable[Prepared], prefix: str | None, rate: float | None, json: bool
) -> Tally:
    """Publish every request, `rate` a second at most, and wait for the acknowledgements.

    A request that cannot be read ends it, and so does Ctrl-C; both say how many were sent before.
    """
    from forebay.cli.interrupts import unwinding_at
    from forebay.cli.progress import counting
    from forebay.stream.publish import DeliveryError, Publication, Publisher, Receipt

    tally = Tally()
    publisher = Publisher(kafka, linger_ms=5)
    publisher.open()
    start = time.monotonic()
    try:
        with unwinding_at([signal.SIGINT]), counting("sent", quiet=json) as advance:
            for number, request in enumerate(requests, start=1):
                _keep_pace(publisher.poll, start, number - 1, rate)
                id, headers = identify(request, None if prefix is None else f"{prefix}{number}")

                def note(receipt: Receipt, id: str = id) -> None:
                    tally.receipts.append((id, receipt))

                tally.sent += 1
                try:
                    publisher.publish(Publication(topic, request.value, id.encode(), headers), note)
                except DeliveryError as error:  # this record cannot be sent; the next ones may
                    note(Receipt(topic, -1, -1, str(error)))
                publisher.poll()
                _tell(tally, json)
                advance(tally.acknowledged)
            publisher.flush(60)
            _tell(tally, json)
            advance(tally.acknowledged)
    except UsageError as error:
        publisher.flush(60)
        _tell(tally, json)
        raise UsageError(f"{error}; {_sent_before(tally, topic)}") from error
    except KeyboardInterrupt:
        publisher.close()
        _tell(tally, json)
        typer.echo(f"forebay: interrupted; {_sent_before(tally, topic)}", err=True)
        raise
    finally:
        publisher.close()
        _tell(tally, json)
    return tally


def _sent_before(tally: Tally, topic: str) -> str:
    if not tally.acknowledged:
        return "nothing was sent"
    return f"{counted(tally.acknowledged, 'request')} before it went to {topic}"


def _keep_pace(poll: Callable[[float], None], start: float, done: int, rate: float | None) -> None:
    """Wait, polling, until `done` records may have been sent at `rate` a second."""
    while rate and (left := start + done / rate - time.monotonic()) > 0:
        poll(min(left, 0.1))


def _tell(tally: Tally, json: bool) -> None:
    """Count the receipts that came; print one JSON line for each if asked."""
    import orjson

    receipts, tally.receipts = tally.receipts, []
    for id, receipt in receipts:
        if receipt.error is None:
            tally.acknowledged += 1
        else:
            tally.failed += 1
            if tally.failed <= TOLD_FAILURES:
                typer.secho(f"forebay: request {id} was not sent: {receipt.error}", err=True, fg="red")
            elif tally.failed == TOLD_FAILURES + 1:
                typer.secho("forebay: others were not sent either; --json has a line for each", err=True, fg="red")
        if json:
            told = {"id": id, "topic": receipt.topic, "partition": receipt.partition, "offset": receipt.offset}
            typer.echo(orjson.dumps(told | {"error": receipt.error}).decode())


def _verdict(settings: Settings, topic: str, input: str) -> Verdict | None:
    """Return what says that the worker at hand would refuse a request; None where none is, or it reads other topics."""
    from functools import partial

    from forebay.cli.at_hand import Fitting, worker_at_hand

    worker = worker_at_hand(settings.ops)
    if worker is None or not worker.reads(topic):
        return None
    return partial(Fitting(worker, settings.limits).check, input=input)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(send)


def send(
    paths: Paths = None,
    topic: Annotated[
        str | None, typer.Option("--topic", help="Default: the first of kafka.input_topics.", show_default=False)
    ] = None,
    input: InputName = "input",
    encoding: EncodingName = "binary",
    pixels: Pixels = False,
    size: Size = None,
    raw: Raw = False,
    model: ModelName = None,
    timeout_ms: TimeoutMs = None,
    priority: Priority = None,
    header: HeaderTexts = None,
    id_prefix: Annotated[
        str | None, typer.Option("--id-prefix", help="Ids are this and a number.", show_default=False)
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, help="Records per second at most.", show_default=False)
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Send what a worker on this machine says it would refuse, too.")
    ] = False,
    json: AsJson = False,
    bootstrap: Bootstrap = None,
    config: ConfigFile = None,
    values: SetValues = None,
) -> int:
    """Publish requests from JSON lines, files or images.

    A line of JSON is an Open Inference Protocol request, sent as it is, or the short form, tensors by name:
    `{"id": "p0", "x": [[1.0, 2.0]]}`, where id, parameters and outputs may be left out. In it numbers with a point
    become FP32 and whole ones INT64, so write 1.0 for a model of floats; arrays of .npy keep their type. Files are
    checked whole before anything is sent; where a worker of this configuration runs on this machine, so are names,
    types and shapes of tensors. With --json one line per record says where it is.
    """
    from forebay.cli.progress import waiting_for_kafka
    from forebay.cli.sources import check_requests, read_requests
    from forebay.stream.tail import OPEN_SECONDS, Tail

    settings = read_settings(config, values, {"kafka.bootstrap_servers": bootstrap})
    kafka = settings.kafka
    where = topic or kafka.input_topics[0]
    form = make_form(input, encoding, pixels, size, raw, make_headers(model, timeout_ms, priority, header))
    verdict = _verdict(settings, where, input) if not (raw or unchecked) else None
    check_requests(paths or [], form, verdict)
    with waiting_for_kafka(kafka.bootstrap_servers, OPEN_SECONDS):
        Tail.require(kafka, where)
    started = time.monotonic()
    tally = publish_all(kafka, where, read_requests(paths or [], form, verdict), id_prefix, rate, json)
    seconds = time.monotonic() - started
    typer.echo(
        f"{tally.acknowledged} sent to {where} in {seconds:.1f} s, {tally.sent - tally.acknowledged} failed", err=True
    )
    return 0 if tally.acknowledged == tally.sent else 1
