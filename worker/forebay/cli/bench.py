"""`forebay bench`: load against a running worker, through Kafka, as a client sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.options import AsJson, Bootstrap, ConfigFile, SetValues, read_settings
from forebay.cli.send import (
    EncodingName,
    HeaderTexts,
    InputName,
    ModelName,
    Paths,
    Pixels,
    Raw,
    Size,
    make_form,
    make_headers,
)
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.cli.documents import Prepared
    from forebay.cli.load import Measured, Shape
    from forebay.settings import Kafka


def measure(kafka: Kafka, requests: list[Prepared], shape: Shape, *, quiet: bool) -> Measured:
    """Run the load against whatever worker answers on the output topic."""
    from forebay.cli.load import Load
    from forebay.cli.progress import counting, waiting_for_kafka
    from forebay.stream.exchange import Exchange, Route
    from forebay.stream.tail import OPEN_SECONDS

    exchange = Exchange(kafka, Route(kafka.input_topics[0], kafka.output_topic))
    with waiting_for_kafka(kafka.bootstrap_servers, OPEN_SECONDS):
        exchange.open(OPEN_SECONDS)
    try:
        with counting("connecting", quiet=quiet) as advance:
            return Load(exchange, [(one.value, one.headers) for one in requests]).run(shape, advance)
    finally:
        exchange.close()


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)


def bench(
    paths: Paths = None,
    inputs: Annotated[
        str | None,
        typer.Option("--inputs", metavar="JSON", help='One request, sent again and again: {"x": [[1.0, 2.0]]}.'),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=0.1, help="Requests per second, whatever comes back.", show_default=False),
    ] = None,
    window: Annotated[int, typer.Option("--window", min=1, help="Without --rate: requests under way at once.")] = 64,
    duration: Annotated[float, typer.Option("--duration", min=0.1, help="Seconds that are measured.")] = 10.0,
    warm_up: Annotated[float, typer.Option("--warm-up", min=0, help="Seconds before that, not measured.")] = 2.0,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for stragglers.")] = 30.0,
    input: InputName = "input",
    encoding: EncodingName = "binary",
    pixels: Pixels = False,
    size: Size = None,
    raw: Raw = False,
    model: ModelName = None,
    header: HeaderTexts = None,
    json: AsJson = False,
    bootstrap: Bootstrap = None,
    config: ConfigFile = None,
    values: SetValues = None,
) -> int:
    """Measure a running worker through Kafka: throughput, latency, batch sizes.

    The requests of the files are sent round and round, each time under a new id. Exits with 1 if any is
    unanswered, or none has a result.
    """
    import orjson

    from forebay.cli.load import Shape
    from forebay.cli.sources import inline_request, read_requests

    if bool(paths) == (inputs is not None):
        raise UsageError("give either files (or -) or --inputs JSON: the requests to send")
    kafka = read_settings(config, values, {"kafka.bootstrap_servers": bootstrap}).kafka
    form = make_form(input, encoding, pixels, size, raw, make_headers(model, None, None, header))
    found = [inline_request(inputs, form)] if inputs is not None else list(read_requests(paths or [], form))
    if not found:
        raise UsageError("the files hold no request")
    measured = measure(kafka, found, Shape(duration, warm_up, rate, window, timeout), quiet=json)
    summary = measured.summary()
    if json:
        typer.echo(orjson.dumps(summary).decode())
    else:
        _print(summary)
    return 1 if measured.unanswered or not summary["statuses"].get("ok") else 0


def _print(summary: dict[str, Any]) -> None:
    from forebay.cli.outcomes import printable

    latency = summary["latency_ms"]
    sizes = summary["batch_sizes"]
    most = ", ".join(f"{size}: {count}" for size, count in sorted(sizes.items(), key=lambda pair: -pair[1])[:6])
    statuses = ", ".join(f"{count:,} {status}" for status, count in summary["statuses"].items())
    typer.echo(f"requests    {summary['requests']:,} in {summary['seconds']:.1f} s ({statuses or 'none'})")
    typer.echo(f"throughput  {summary['throughput']:,.0f} per second")
    typer.echo("latency     " + "  ".join(f"{name} {value} ms" for name, value in latency.items()))
    batched = (
        f"mean {summary['batch_size']}  (requests by size: {most})" if most else "none: no request reached the model"
    )
    typer.echo(f"batch size  {batched}")
    if summary["first_error"]:
        typer.echo(f"an error    {printable(summary['first_error'])}")
    if summary["unanswered"]:
        typer.echo(f"unanswered  {summary['unanswered']:,}")
