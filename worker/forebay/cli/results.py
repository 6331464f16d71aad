"""`forebay results`: follow the output topic."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.options import AsJson, Bootstrap, ConfigFile, SetValues, read_settings
from forebay.wording import counted

if TYPE_CHECKING:
    from forebay.records import Record
    from forebay.stream.tail import Tail


def show(record: Record, json: bool) -> None:
    """Print one outcome."""
    import orjson
    from rich.console import Console

    from forebay.cli.outcomes import as_line, key_of, read_outcome, record_as_json

    if json:
        typer.echo(orjson.dumps(record_as_json(record)).decode())
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(key_of(record), style="bold", end="  ", markup=False)
        console.print(as_line(read_outcome(record)))


def follow(tail: Tail, ids: list[str], count: int | None, until_end: bool, timeout: float | None, json: bool) -> int:
    """Print outcomes until there are enough, the end is reached or time is up; returns how many."""
    from forebay.cli.outcomes import matches
    from forebay.stream.troubles import plain_cause

    shown, is_cut_off = 0, False
    deadline = None if timeout is None else time.monotonic() + timeout
    while (count is None or shown < count) and not (until_end and tail.at_end):
        left = 0.2 if deadline is None else min(0.2, deadline - time.monotonic())
        if left <= 0:
            break
        records = tail.read(wait=left)
        if (why := tail.take_outage()) is not None and not is_cut_off:
            typer.echo(f"no broker answers ({plain_cause(why)}): waiting for one", err=True)
        is_cut_off = not records and (is_cut_off or why is not None)
        for record in records:
            if matches(record, ids) and (count is None or shown < count):
                show(record, json)
                shown += 1
    return shown


def _say_from_where(topic: str, from_beginning: bool, until_end: bool) -> None:
    """Explain an empty screen before it is one; on standard error, so that it is in no program's way."""
    if until_end:
        if not from_beginning:
            typer.echo(f"{topic} is read from its end to its end; --from-beginning shows what is there", err=True)
        return
    start = "beginning" if from_beginning else "end"
    earlier = "" if from_beginning else "; --from-beginning shows earlier ones"
    typer.echo(f"following {topic} from its {start} (Ctrl-C ends it){earlier}", err=True)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(results)


def results(
    topic: Annotated[
        str | None, typer.Option("--topic", help="Default: kafka.output_topic.", show_default=False)
    ] = None,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="Start at the first record kept, not at the end.")
    ] = False,
    until_end: Annotated[bool, typer.Option("--until-end", help="Stop at the end instead of following on.")] = False,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="Stop after this many.", show_default=False)
    ] = None,
    id: Annotated[
        list[str] | None, typer.Option("--id", help="Only this request id; repeatable.", show_default=False)
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, help="Stop after this many seconds.", show_default=False)
    ] = None,
    json: AsJson = False,
    bootstrap: Bootstrap = None,
    config: ConfigFile = None,
    values: SetValues = None,
) -> int:
    """Follow the output topic, without a consumer group.

    Exits with 1 if --count or --id was given and fewer outcomes came before --timeout.
    """
    from forebay.cli.progress import waiting_for_kafka
    from forebay.stream.tail import OPEN_SECONDS, Tail

    kafka = read_settings(config, values, {"kafka.bootstrap_servers": bootstrap}).kafka
    ids = id or []
    wanted = count if count is not None else len(ids) or None
    tail = Tail(kafka, [topic or kafka.output_topic], "beginning" if from_beginning else "end")
    with waiting_for_kafka(kafka.bootstrap_servers, OPEN_SECONDS):
        tail.open()
    _say_from_where(topic or kafka.output_topic, from_beginning, until_end)
    try:
        shown = follow(tail, ids, wanted, until_end, timeout, json)
    finally:
        tail.close()
    if wanted is None or shown >= wanted:
        return 0
    why = "the end" if timeout is None else f"{timeout:g} s"
    typer.echo(f"{shown:,} of {counted(wanted, 'outcome')} came by {why}", err=True)
    return 1
