"""`forebay dlq`: list, show and replay dead letters."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.options import AsJson, Bootstrap, ConfigFile, SetValues, read_settings
from forebay.errors import UsageError
from forebay.wording import counted, times

if TYPE_CHECKING:
    from forebay.cli.letters import Letter, Selection
    from forebay.cli.progress import Advance
    from forebay.settings import Kafka

Codes = Annotated[
    list[str] | None, typer.Option("--code", help="Only this error code; repeatable.", show_default=False)
]
Models = Annotated[
    list[str] | None, typer.Option("--model", help="Only requests that named this model.", show_default=False)
]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Only this request id; repeatable.", show_default=False)]
Since = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="ISO time, or an age: 30m, 2h, 7d.", show_default=False)
]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", help="Before this time.", show_default=False)]
Limit = Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most this many.", show_default=False)]


@contextlib.contextmanager
def reading(kafka: Kafka, selection: Selection) -> Iterator[Iterator[Letter]]:
    """Open the dead letter topic and yield its letters up to the end found now."""
    from forebay.cli.letters import Letter
    from forebay.cli.progress import waiting_for_kafka
    from forebay.stream.tail import OPEN_SECONDS, Tail

    tail = Tail(kafka, [kafka.dead_letter_topic], "beginning" if selection.since_ms is None else selection.since_ms)
    with waiting_for_kafka(kafka.bootstrap_servers, OPEN_SECONDS):
        tail.open()
    try:
        letters = (Letter(record) for record in tail.read_to_end())
        yield (letter for letter in letters if selection.takes(letter))
    finally:
        tail.close()


def select(
    codes: list[str] | None, models: list[str] | None, ids: list[str] | None, since: str | None, until: str | None
) -> Selection:
    """Make the selection that the command line describes."""
    from forebay.cli.letters import Selection, parse_time

    now = datetime.now(UTC)
    return Selection(codes or (), models or (), ids or (), parse_time(since, now), parse_time(until, now))


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="List, show and replay dead letters.", no_args_is_help=True)
    group.command("list")(list_letters)
    group.command("show")(show)
    group.command("replay")(replay)
    app.add_typer(group, name="dlq")


def list_letters(
    code: Codes = None,
    model: Models = None,
    id: Ids = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
    json: AsJson = False,
    bootstrap: Bootstrap = None,
    config: ConfigFile = None,
    values: SetValues = None,
) -> None:
    """List dead letters with their error, oldest first: by the time when they were written, over all partitions.

    Each has its place, PARTITION/OFFSET, which forebay dlq show takes. With --limit the oldest of those selected.
    """
    import orjson

    from forebay.cli.letters import oldest
    from forebay.cli.progress import counting

    kafka = read_settings(config, values, {"kafka.bootstrap_servers": bootstrap}).kafka
    selection = select(code, model, id, since, until)
    with reading(kafka, selection) as letters, counting("reading dead letters", quiet=json) as advance:
        found, total = oldest(_counting(letters, advance), limit)
    for one in found:
        if json:
            typer.echo(orjson.dumps(one).decode())
        else:
            _print(one)
    if not json:
        codes = Counter(str(one["code"]) for one in found)
        by_code = ", ".join(f"{count} {name}" for name, count in codes.most_common())
        shown = f"the oldest {len(found):,} of {counted(total, 'dead letter')}"
        told = shown if total > len(found) else counted(total, "dead letter")
        typer.echo(f"{told} on {kafka.dead_letter_topic}{': ' + by_code if by_code else ''}", err=True)


def _counting(letters: Iterator[Letter], advance: Advance) -> Iterator[Letter]:
    for number, letter in enumerate(letters, start=1):
        if number % 256 == 0:
            advance(number)
        yield letter


def _print(one: dict[str, Any]) -> None:
    """Print a letter in two lines."""
    from rich.console import Console
    from rich.text import Text

    from forebay.cli.letters import show_time
    from forebay.cli.outcomes import printable

    console = Console(highlight=False, soft_wrap=True)
    head = (f"{one['place']}", "bold"), f"  {show_time(one['timestamp_ms'])[:19]}  ", (f"{one['code']}", "red")
    console.print(Text.assemble(*head, f"  {printable(one['id'])}"))
    tried = _counted(one["attempts"], one["replays"])
    console.print(Text(f"    {printable(one['message'])} ({one['origin']}, {tried})", "dim"))


def _counted(attempts: int, replays: int) -> str:
    replayed = f", replayed {times(replays)}" if replays else ""
    return f"{counted(attempts, 'attempt')}{replayed}"


def show(
    letter: Annotated[str, typer.Argument(help="PARTITION/OFFSET as `dlq list` prints it, or a request id.")],
    json: AsJson = False,
    bootstrap: Bootstrap = None,
    config: ConfigFile = None,
    values: SetValues = None,
) -> None:
    """Show one dead letter whole: error, headers and payload."""
    import orjson

    from forebay.cli.letters import Selection, show_time
    from forebay.cli.outcomes import as_text, headers_as_json, printable, shown_value

    kafka = read_settings(config, values, {"kafka.bootstrap_servers": bootstrap}).kafka
    with reading(kafka, Selection()) as letters:
        found = next((one for one in letters if letter in (one.place, one.id)), None)
    if found is None:
        raise UsageError(f"no dead letter {letter} on {kafka.dead_letter_topic}; see forebay dlq list")
    record = found.record
    headers = headers_as_json(record.headers)
    if json:
        told = found.as_json() | {"key": as_text(record.key), "headers": headers, "value": as_text(record.value)}
        typer.echo(orjson.dumps(told).decode())
        return
    typer.echo(printable(f"{found.id}: {found.code}: {found.message}"))
    typer.echo(
        f"from {found.origin}, written {show_time(record.timestamp_ms)}, {_counted(found.attempts, found.replays)}\n"
    )
    for name, value in headers.items():
        typer.echo(printable(f"  {name}: {shown_value(value)}"))
    payload = record.value or b""
    typer.echo(f"\n{counted(len(payload), 'byte')}:")
    typer.echo(printable(payload[:4096].decode("utf-8", "backslashreplace")) + ("…" if len(payload) > 4096 else ""))


def replay(
    code: Codes = None,
    model: Models = None,
    id: Ids = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, help="Records per second at most.", show_default=False)
    ] = None,
    max_replays: Annotated[
        int, typer.Option("--max-replays", min=1, help="Leave out requests that were replayed this often.")
    ] = 3,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be replayed, and publish nothing.")
    ] = False,
    json: AsJson = False,
    bootstrap: Bootstrap = None,
    config: ConfigFile = None,
    values: SetValues = None,
) -> int:
    """Publish dead letters again, byte for byte, to the topics they came from.

    A replayed request is a new record: it gets a new outcome. The letters stay where they are, so that a second
    replay of the same letters sends them again; the summary gives the --since that leaves them out. With --limit the
    oldest of those selected are sent.
    """
    import orjson

    from forebay.cli.letters import show_time
    from forebay.cli.replaying import Replayed, eligible, replay_letters

    kafka = read_settings(config, values, {"kafka.bootstrap_servers": bootstrap}).kafka
    with reading(kafka, select(code, model, id, since, until)) as letters:
        if dry_run:
            done = Replayed()
            done.replayed = sum(1 for _ in eligible(letters, limit, max_replays, done))
        else:
            done = replay_letters(kafka, letters, limit, max_replays, rate)
    next_since = None if dry_run or done.newest_ms is None else show_time(done.newest_ms + (0 if done.cut_short else 1))
    if json:
        told = {"dry_run": dry_run, "replayed": done.replayed, "failed": done.failed, "topics": done.topics}
        left_out = {"replayed_too_often": done.exhausted, "without_origin": done.homeless, "next_since": next_since}
        typer.echo(orjson.dumps(told | left_out).decode())
    else:
        where = ", ".join(f"{topic} ({count})" for topic, count in done.topics.items()) or "nowhere"
        typer.echo(f"{'would replay' if dry_run else 'replayed'} {done.replayed} to {where}")
        if done.exhausted:
            typer.echo(f"left out {done.exhausted} that were replayed {times(max_replays)} already (--max-replays)")
        if done.homeless:
            typer.echo(f"left out {done.homeless} without {'kafka_dlt-original-topic'}: not written by Forebay")
        if next_since:
            again = ", which sends those of its first millisecond again" if done.cut_short else ""
            typer.echo(f"to leave these out next time: --since {next_since}{again}")
    return 1 if done.failed else 0
