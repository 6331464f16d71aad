"""`forebay broker`: a real Apache Kafka in the foreground, for development; needs no Docker and no Java."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.options import AsJson
from forebay.errors import KafkaUnavailableError, UsageError

if TYPE_CHECKING:
    from forebay.brokers.embedded import EmbeddedKafka

WATCH_SECONDS = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="broker")(broker)


def broker(
    brokers: Annotated[int, typer.Option("--brokers", min=1, max=9, help="How many brokers the cluster has.")] = 1,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65_535, help="The first broker's port; 0 takes free ones.")
    ] = 0,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", help="Keep the data here; without it they go with the broker.", show_default=False),
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic", metavar="NAME[:PARTITIONS]", help="Create a topic; may be repeated.", show_default=False
        ),
    ] = None,
    kafka_version: Annotated[
        str | None,
        typer.Option("--kafka-version", metavar="X.Y.Z", help="Another version, 3.7.0 or later.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a real Apache Kafka on this machine until Ctrl-C."""
    topics = dict(_read_topic(text) for text in topic or ())
    version = _read_version(kafka_version)
    stop = _Stop()
    for number in STOP_SIGNALS:
        signal.signal(number, stop)

    from forebay.broker import EmbeddedKafka, to_stderr

    cluster = EmbeddedKafka(brokers, port, data_dir, announce=to_stderr, version=version)
    with contextlib.suppress(KeyboardInterrupt), cluster as kafka:
        _create(kafka, topics)
        _greet(kafka, topics, data_dir, as_json)
        while len(kafka.java_pids()) == brokers:
            time.sleep(WATCH_SECONDS)
        raise KafkaUnavailableError(f"a broker ended by itself; the end of its log:\n{kafka.last_lines()}")


class _Stop:
    """What a signal does: the first unwinds from wherever we are, a download included; a later one leaves at once.

    The JVM dies with us either way. One that follows within a second is the same wish: wrappers such as timeout(1)
    signal the process and then its group.
    """

    def __init__(self) -> None:
        self._asked_at: float | None = None

    def __call__(self, *_: object) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            raise KeyboardInterrupt
        if now - self._asked_at > 1.0:
            os._exit(130)


def _read_topic(text: str) -> tuple[str, int]:
    name, separator, count = text.rpartition(":")
    if not separator:
        name, count = text, "1"
    if not name or not count.isascii() or not count.isdigit() or not 1 <= int(count) <= 10_000:
        raise UsageError(f"--topic takes NAME or NAME:PARTITIONS, for example requests:3, not {text!r}")
    return name, int(count)


def _read_version(text: str | None) -> str:
    from forebay.brokers.jars import KAFKA_VERSION, OLDEST_VERSION

    if text is None:
        return KAFKA_VERSION
    parts = text.split(".")
    if len(parts) == 3 and all(part.isascii() and part.isdigit() for part in parts):
        oldest = [int(part) for part in OLDEST_VERSION.split(".")]
        if [int(part) for part in parts] >= oldest:
            return text
    raise UsageError(f"--kafka-version takes {OLDEST_VERSION} or later, for example {KAFKA_VERSION}, not {text!r}")


def _create(kafka: EmbeddedKafka, topics: dict[str, int]) -> None:
    from forebay.stream import admin

    admin.create_topics({"bootstrap.servers": kafka.bootstrap_servers}, topics)


def _greet(kafka: EmbeddedKafka, topics: dict[str, int], data_dir: Path | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"bootstrap_servers": kafka.bootstrap_servers, "topics": topics}))
        sys.stdout.flush()
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"Apache Kafka {kafka.version} is running: [bold]{kafka.bootstrap_servers}[/bold]")
    for name, count in topics.items():
        console.print(f"  topic {name}, {count} partition{'s' if count > 1 else ''}")
    kept = f"kept in {data_dir}" if data_dir else "deleted at the end"
    console.print(f"[dim]Its data are {kept}. Ctrl-C stops it.[/dim]")
    sys.stdout.flush()
