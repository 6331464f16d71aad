"""`forebay topics`: make the topics that the settings name and that do not exist yet."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.options import AsJson, Bootstrap, ConfigFile, SetValues, read_settings
from forebay.wording import counted

if TYPE_CHECKING:
    from forebay.settings import Kafka


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(topics)


def topics_command(config: Path | None, bootstrap: str | None, values: Sequence[str] | None) -> str:
    """Give the command that makes the topics of a configuration that was given like this."""
    words = ["forebay", "topics"]
    words += [] if config is None else ["--config", str(config)]
    words += [] if bootstrap is None else ["--bootstrap-servers", bootstrap]
    for value in values or ():
        words += ["--set", value]
    return shlex.join(words)


def named_topics(kafka: Kafka, more: Sequence[str]) -> list[str]:
    """Give the topics that a worker with these settings needs, and `more`, each once."""
    return list(dict.fromkeys([*kafka.input_topics, kafka.output_topic, kafka.dead_letter_topic, *more]))


def topics(
    partitions: Annotated[
        int, typer.Option("--partitions", min=1, help="Partitions of each new topic: so many workers share the work.")
    ] = 6,
    replication: Annotated[
        int | None,
        typer.Option("--replication", min=1, help="Replicas; default: what the cluster says.", show_default=False),
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", help="One more topic, such as a reply topic; repeatable.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be made, and make nothing.")] = False,
    json: AsJson = False,
    bootstrap: Bootstrap = None,
    config: ConfigFile = None,
    values: SetValues = None,
) -> None:
    """Make the topics of the settings that do not exist: inputs, results, dead letters.

    Topics that exist stay as they are. May be repeated.
    """
    import orjson

    from forebay.cli.progress import waiting_for_kafka
    from forebay.stream import admin
    from forebay.stream.client_config import client_config

    kafka = read_settings(config, values, {"kafka.bootstrap_servers": bootstrap}).kafka
    asked = client_config(kafka)
    with waiting_for_kafka(kafka.bootstrap_servers, admin.TIMEOUT_SECONDS):
        before = admin.partition_counts(asked)
    made: dict[str, int] = {}
    for name in named_topics(kafka, topic or ()):
        if name not in before:
            if not dry_run:  # one by one, so that what was made is told before an error ends it
                admin.create_topics(asked, {name: partitions}, replication=replication or -1)
            made[name] = partitions
        if not json:
            typer.echo(_line(name, before.get(name), partitions, dry_run))
    if json:
        there = {name: before[name] for name in named_topics(kafka, topic or ()) if name in before}
        typer.echo(orjson.dumps({"dry_run": dry_run, "made": made, "there": there}).decode())
    elif not made:
        typer.echo(f"nothing to make at {kafka.bootstrap_servers}", err=True)


def _line(name: str, found: int | None, partitions: int, dry_run: bool) -> str:
    if found is not None:
        return f"there   {name}, {counted(found, 'partition')}"
    return f"{'missing' if dry_run else 'made':<7} {name}, {counted(partitions, 'partition')}"
