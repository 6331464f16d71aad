"""`forebay run`: the worker. Builds the rooms, installs the signals, and turns the end into an exit code."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.options import Bootstrap, ConfigFile, SetValues, read_settings
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.records import Partition
    from forebay.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run", help="Run the worker: read requests, batch them, run the model, answer, commit.")(run)


def run(
    config: ConfigFile = None,
    set_values: SetValues = None,
    bootstrap_servers: Bootstrap = None,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="Stop after what is in the input topics now is answered.")
    ] = False,
) -> None:
    """Run the worker until SIGTERM or Ctrl-C, which drain it; a second one leaves at once."""
    settings = read_settings(config, set_values, {"kafka.bootstrap_servers": bootstrap_servers})
    if not settings.served:
        raise ConfigError("no model is configured: set model.factory (package.module:Class), for example in --config")
    search = [Path.cwd(), *([config.resolve().parent] if config is not None else [])]
    serve(settings, search, until_end=until_end)


def serve(settings: Settings, search: list[Path], *, until_end: bool) -> None:
    """Run a worker with these settings in this process."""
    from forebay import failpoints, logs
    from forebay.assembly import build_rooms
    from forebay.health import Health, OpsServer
    from forebay.metrics import Metrics
    from forebay.worker import Worker

    logs.configure(settings.ops)
    log = logs.logger("run")
    if armed := failpoints.arm_from_environment():
        log.warning("failpoints", armed=armed)
    limits, until = _look_at_topics(settings, until_end)
    metrics, health = Metrics(), Health()
    server = OpsServer(settings.ops, health, metrics.registry)
    log.info("ops", ops_url=server.start())
    worker = Worker(settings, build_rooms(settings, search, limits), metrics, health)
    _install_signals(worker)
    # A request's values form no cycles, so looking for cycles at every few hundred of them only costs: with automatic
    # collection the loop takes 20 µs per small request, without it 15. The observer collects once a minute instead.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        worker.run(until)
    finally:
        server.stop()


def _look_at_topics(settings: Settings, until_end: bool) -> tuple[dict[str, int], Mapping[Partition, int] | None]:
    """Check that Kafka and the topics are there; return their message limits and, if asked for, their ends.

    Raises KafkaUnavailableError (exit 69) or ConfigError (exit 78).
    """
    from forebay.records import Partition
    from forebay.stream import admin
    from forebay.stream.client_config import client_config, consumer_config, producer_config

    kafka = settings.kafka
    admin.refuse_bad_properties(consumer_config(kafka, settings.batch), producer_config(kafka, settings.delivery))
    config = client_config(kafka)
    counts = admin.partition_counts(config)
    for topic in (*kafka.input_topics, kafka.output_topic, kafka.dead_letter_topic):
        if topic not in counts:
            raise ConfigError(
                f"topic {topic} does not exist at {kafka.bootstrap_servers}; create the worker's topics with "
                "forebay topics and the same --config, or with your own tools"
            )
    limits = admin.message_limits(config, (kafka.output_topic, kafka.dead_letter_topic))
    if not until_end:
        return limits, None
    ends = admin.end_offsets(config, kafka.input_topics)
    begins = admin.begin_offsets(config, kafka.input_topics)
    return limits, {Partition(*p): end for p, end in ends.items() if end > begins.get(p, 0)}


def _install_signals(worker: Any) -> None:
    """Let SIGTERM and SIGINT drain; a second one leaves at once. The flags are all that a handler touches."""
    received: list[int] = []

    def on_signal(number: int, _: object) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        worker.stop()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
