"""`forebay request`: send one request and wait for its result."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.options import AsJson, Bootstrap, ConfigFile, SetValues, read_settings
from forebay.cli.send import (
    EncodingName,
    HeaderTexts,
    InputName,
    ModelName,
    Pixels,
    Priority,
    Raw,
    Size,
    make_form,
    make_headers,
)
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.cli.documents import Form, Prepared
    from forebay.records import Record
    from forebay.settings import Kafka


def exchange_one(
    kafka: Kafka, id: str, request: Prepared, reply_to: str | None, timeout: float
) -> tuple[Record, float]:
    """Send one request; return its outcome's record, and the seconds from sending it to seeing that.

    A producer connects with its first record, so that is in them; finding the ends of the output topic is not.

    Raises InferenceTimeoutError, which says how far it came.
    """
    from forebay.calls import InferenceTimeoutError
    from forebay.cli.progress import waiting_for, waiting_for_kafka
    from forebay.records import Reply
    from forebay.stream.exchange import Exchange, Route
    from forebay.stream.tail import OPEN_SECONDS

    reply = Reply(reply_to, None) if reply_to else None
    exchange = Exchange(kafka, Route(kafka.input_topics[0], kafka.output_topic, reply))
    with waiting_for_kafka(kafka.bootstrap_servers, seconds := min(OPEN_SECONDS, timeout)):
        exchange.open(seconds)
    sent = None
    try:
        sent = exchange.send(request.value, id.encode(), request.headers)
        with waiting_for(f"the result of request {id}", timeout):
            record = sent.future.result(timeout)
        return record, time.monotonic() - sent.sent_at
    except TimeoutError as error:
        raise InferenceTimeoutError(
            f"no result for request {id} within {timeout:g} s: {exchange.explain(sent) if sent else 'it was not sent'}"
        ) from error
    finally:
        if sent is not None:  # nobody waits for it any more, so closing need not either
            exchange.abandon(sent)
        exchange.close()


def only_request(path: str, form: Form) -> Prepared:
    """Read a file with one request; UsageError for none and for several."""
    from forebay.cli.sources import STDIN, read_requests

    found = read_requests([path], form)
    first = next(found, None)
    name = "standard input" if path == STDIN else path
    if first is None:
        raise UsageError(f"{name} holds no request")
    more = sum(1 for _ in found)
    if more:
        raise UsageError(
            f"{name} holds {1 + more} requests and forebay request sends one; forebay send takes many, and forebay "
            "results shows what comes back; nothing was sent"
        )
    return first


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(request)


def request(
    path: Annotated[
        str | None,
        typer.Argument(help="A file with one request, or - for standard input.", show_default=False),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option("--inputs", metavar="JSON", help='The request itself: {"x": [[1.0, 2.0]]}.', show_default=False),
    ] = None,
    input: InputName = "input",
    encoding: EncodingName = "binary",
    pixels: Pixels = False,
    size: Size = None,
    raw: Raw = False,
    model: ModelName = None,
    priority: Priority = None,
    header: HeaderTexts = None,
    id: Annotated[str | None, typer.Option("--id", help="The request id.", show_default=False)] = None,
    reply_to: Annotated[
        str | None, typer.Option("--reply-to", help="A reply topic; default: the output topic.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds to wait.")] = 30.0,
    json: AsJson = False,
    bootstrap: Bootstrap = None,
    config: ConfigFile = None,
    values: SetValues = None,
) -> int:
    """Send one request and print its result.

    The file holds a request as `forebay send` takes it: numbers with a point become FP32, whole ones INT64.
    Exits with 1 for an error result or if none came in time; the message says how far the request got.
    """
    from forebay.cli.send import identify
    from forebay.cli.sources import inline_request

    if (path is None) == (inputs is None):
        raise UsageError("give either a file (or -) or --inputs JSON")
    kafka = read_settings(config, values, {"kafka.bootstrap_servers": bootstrap}).kafka
    told = make_headers(model, max(1, int(timeout * 1000)), priority, header)
    form = make_form(input, encoding, pixels, size, raw, told)
    found = inline_request(inputs, form) if inputs is not None else only_request(path or "-", form)
    name, found_headers = identify(found, id)
    ready = type(found)(found.value, found_headers, name, found.origin)
    record, seconds = exchange_one(kafka, name, ready, reply_to, timeout)
    return _print(record, seconds, json)


def _print(record: Record, seconds: float, json: bool) -> int:
    """Print the outcome; returns the exit code."""
    import orjson

    from forebay.cli.outcomes import read_outcome, record_as_json
    from forebay.cli.results import show
    from forebay.wire import Result

    milliseconds = round(seconds * 1000, 1)
    if json:
        typer.echo(orjson.dumps(record_as_json(record) | {"latency_ms": milliseconds}).decode())
    else:
        show(record, json=False)
        typer.echo(f"{milliseconds:.1f} ms, connecting included; forebay bench measures latency", err=True)
    return 0 if isinstance(read_outcome(record), Result) else 1
