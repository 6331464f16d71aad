"""`forebay run`: the worker. Builds the rooms, installs the signals, and turns the end into an exit code."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.options import Bootstrap, ConfigFile, SetValues, read_settings
from forebay.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from forebay.health import Health
    from forebay.records import Partition
    from forebay.settings import Settings
    from forebay.stream.share_consumer import Sharing
    from forebay.supervision.tether import Tether

_SWITCH_SECONDS = 0.001
"""What a thread beside a busy loop waits for the interpreter, as the end of a transaction does twice; else 5 ms."""

LEAVE_SECONDS = 20.0
"""What a worker may take, after its drain budget, to leave the group and end its replicas."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run")(run)


def run(
    config: ConfigFile = None,
    set_values: SetValues = None,
    bootstrap_servers: Bootstrap = None,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="Stop after what is in the input topics now is answered.")
    ] = False,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="all|0,2",
            help="One worker process per device (all: of CUDA), each a member of the group, in place of "
            "inference.device. They share one HTTP port, are started again when they die, and drain together.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run the worker: read requests, batch them, run the model, answer, commit.

    SIGTERM or Ctrl-C drain it: what was read is answered and committed; a second one leaves at once. SIGHUP reloads
    models. Kafka may come up 15 s later than the worker. Exits with 0 when drained, 69 if Kafka is not reachable at the
    start, 75 if the device or the model is lost, 78 if the configuration is wrong.
    """
    from forebay.supervision.tether import tether_of_this_worker

    hangups = _remember_hangups()
    tether = tether_of_this_worker()
    with tether.reporting() if tether is not None else nullcontext():
        settings = read_settings(config, set_values, {"kafka.bootstrap_servers": bootstrap_servers})
        if not settings.served:
            raise ConfigError(
                "no model is configured: set model.factory (package.module:Class), for example in --config"
            )
        if until_end and settings.delivery.share_group:
            raise UsageError(
                "--until-end does not go with delivery.share_group: a share group has no committed offsets that "
                "would tell the end; stop the worker with SIGTERM, which drains it"
            )
        if devices is not None:
            raise typer.Exit(_supervise(settings, devices, hangups))
        search = [Path.cwd(), *([config.resolve().parent] if config is not None else [])]
        again = partial(read_settings, config, set_values, {"kafka.bootstrap_servers": bootstrap_servers})
        serve(settings, search, until_end=until_end, tether=tether, read_again=again, hangups=hangups)


def serve(
    settings: Settings,
    search: list[Path],
    *,
    until_end: bool,
    tether: Tether | None = None,
    read_again: Callable[[], Settings] | None = None,
    hangups: Sequence[int] = (),
) -> None:
    """Run a worker with these settings in this process; `tether` leads to its supervisor, if it has one.

    `read_again` reads the settings once more, for a reload; `hangups` has the SIGHUPs that came before this one's own.
    """
    from forebay import failpoints, logs
    from forebay.about import About
    from forebay.assembly import build_rooms
    from forebay.failures import account
    from forebay.health import Health, OpsServer, answer
    from forebay.metrics import Metrics
    from forebay.supervision.devices import settings_for
    from forebay.tracing import start as start_tracing
    from forebay.worker import Worker

    def own(read: Settings) -> Settings:
        return read if tether is None else settings_for(read, tether.device, tether.devices)

    settings = own(settings)
    logs.configure(settings.ops, **({} if tether is None else {"device": tether.name}))
    log = logs.logger("run")
    if armed := failpoints.arm_from_environment():
        log.warning("failpoints", armed=armed)
    limits, until = _look_at_topics(settings, until_end)
    metrics, health = Metrics(), Health()
    health.about = About(settings.kafka.group_id, settings.kafka.input_topics)
    server = OpsServer(settings.ops, lambda path: answer(path, health, metrics.registry))
    log.info("ops", ops_url=(url := server.start()))
    _say_what_is_loaded(settings, log)
    sharing = _join_terms(settings, health) if settings.delivery.share_group else None
    rooms = build_rooms(settings, search, limits, sharing)
    health.about.signatures = rooms.pool.signatures
    rooms.tracing = start_tracing(settings)
    worker = Worker(settings, rooms, metrics, health)
    if read_again is not None:
        worker.reloading.read = lambda: own(read_again())
    _install_signals(worker, leaves_at_once=tether is None)
    if hangups:
        worker.reloading.ask()
    if tether is not None:
        tether.tell(url=url)
        tether.watch()
    # A request's values form no cycles, so looking for cycles at every few hundred of them only costs: with automatic
    # collection the loop takes 20 µs per small request, without it 15. The observer collects once a minute instead.
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(_SWITCH_SECONDS)
    began = time.monotonic()
    try:
        worker.run(until)
    finally:
        if health.models:  # else it never served
            log.info("answered", **account(metrics.outcomes(), time.monotonic() - began))
        if rooms.tracing is not None:
            rooms.tracing.close()
        server.stop()


def _say_what_is_loaded(settings: Settings, log: Any) -> None:
    """Name what takes long from here: the replicas tell the rest, each its loading, its warm-up and its checks."""
    inference = settings.inference
    for model in settings.served:
        source = model.factory or str(model.path)
        log.info(
            "starting_model",
            model=f"{model.name}:{model.version}",
            source=source,
            device=inference.device,
            replicas=inference.replicas,
            at_most_seconds=inference.start_timeout_ms / 1000,
        )


def _join_terms(settings: Settings, health: Health) -> Sharing:
    """Bring the share group's settings to what this worker needs; return the terms on which it lends records."""
    from dataclasses import replace

    from forebay import logs
    from forebay.stream import share_group
    from forebay.stream.client_config import client_config

    sharing, changes = share_group.agree(client_config(settings.kafka), settings)
    log = logs.logger("run")
    log.warning("experimental", setting="delivery.share_group", why="the client's share consumer is a preview")
    if changes:
        log.info("share_group_changed", group=settings.kafka.group_id, changes=changes)
    return replace(sharing, may_take=lambda: health.may_take)


def _look_at_topics(settings: Settings, until_end: bool) -> tuple[dict[str, int], Mapping[Partition, int] | None]:
    """Check that Kafka and the topics are there; return their message limits and, if asked for, their ends.

    Raises KafkaUnavailableError (exit 69) or ConfigError (exit 78).
    """
    from forebay.records import Partition
    from forebay.stream import admin
    from forebay.stream.client_config import client_config, consumer_config, producer_config, share_config

    kafka = settings.kafka
    consumer = (share_config if settings.delivery.share_group else consumer_config)(kafka, settings.batch)
    admin.refuse_bad_properties(consumer, producer_config(kafka, settings.delivery))
    config = client_config(kafka)
    counts = admin.partition_counts(config, on_wait=partial(_tell_wait, kafka.bootstrap_servers))
    named = dict.fromkeys([*kafka.input_topics, kafka.output_topic, kafka.dead_letter_topic])
    if missing := [topic for topic in named if topic not in counts]:
        several = f"topics {', '.join(missing)} do" if len(missing) > 1 else f"topic {missing[0]} does"
        raise ConfigError(
            f"{several} not exist at {kafka.bootstrap_servers}, or may not be seen with this login (forebay check says "
            "which); create the worker's topics with forebay topics and the same --config, or with your own tools"
        )
    limits = admin.message_limits(config, (kafka.output_topic, kafka.dead_letter_topic))
    if not until_end:
        return limits, None
    ends = admin.end_offsets(config, kafka.input_topics)
    begins = admin.begin_offsets(config, kafka.input_topics)
    return limits, {Partition(*p): end for p, end in ends.items() if end > begins.get(p, 0)}


def _tell_wait(servers: str, why: str | None) -> None:
    """Say that Kafka is waited for: the broker may come up after the worker, as where both are started together."""
    from forebay import logs
    from forebay.stream.admin import TIMEOUT_SECONDS
    from forebay.stream.troubles import NO_ANSWER, plain_cause

    told = NO_ANSWER if why is None else plain_cause(why)
    logs.logger("run").warning("waiting_for_kafka", servers=servers, why=told, seconds=TIMEOUT_SECONDS)


def _remember_hangups() -> Sequence[int]:
    """Let a SIGHUP that comes while the worker is built wait, in what this returns: left alone it ends the process."""
    has_terminal = os.isatty(0)
    came: list[int] = []

    def on_hangup(number: int, _: object) -> None:
        if has_terminal and not os.isatty(0):  # the terminal was closed, and nothing has begun
            os._exit(128 + number)
        came.append(number)

    signal.signal(signal.SIGHUP, on_hangup)
    return came


def _supervise(settings: Settings, devices: str, hangups: Sequence[int] = ()) -> int:
    """Run one worker per device with this process's own arguments; return the worst exit code."""
    from forebay import logs
    from forebay.health import OpsServer
    from forebay.metrics import SupervisorMetrics
    from forebay.supervision.combined import Combined
    from forebay.supervision.devices import devices_of
    from forebay.supervision.supervisor import Patience, Supervisor
    from forebay.supervision.workers import DeviceWorker, without_devices

    names = devices_of(devices)
    logs.configure(settings.ops)
    command = [sys.executable, "-m", "forebay", *without_devices(sys.argv[1:])]
    workers = [DeviceWorker(command, device, names) for device in names]
    patience = Patience(settings.inference.max_restarts, settings.delivery.drain_timeout_ms / 1000 + LEAVE_SECONDS)
    metrics = SupervisorMetrics()
    supervisor = Supervisor(workers, patience, metrics)
    server = OpsServer(settings.ops, Combined(workers, metrics.registry))
    logs.logger("run").info("ops", ops_url=server.start())
    has_terminal = os.isatty(0)

    def on_hangup(number: int, _: object) -> None:  # as for a worker: a closed terminal leaves nobody to stop us
        supervisor.on_signal(signal.SIGTERM if has_terminal and not os.isatty(0) else number)

    signal.signal(signal.SIGTERM, supervisor.on_signal)
    signal.signal(signal.SIGINT, supervisor.on_signal)
    signal.signal(signal.SIGHUP, on_hangup)
    if hangups:
        supervisor.on_signal(signal.SIGHUP, None)
    try:
        return supervisor.run()
    finally:
        server.stop()


def _install_signals(worker: Any, *, leaves_at_once: bool) -> None:
    """Let SIGTERM and SIGINT drain, a second one leave at once, and SIGHUP reload. A handler touches flags alone.

    Under a supervisor every one drains: an orchestrator may signal both, and the supervisor ends who is to leave.
    """
    received: list[int] = []

    def on_signal(number: int, _: object) -> None:
        if received and leaves_at_once:
            os._exit(128 + number)
        received.append(number)
        worker.stop()

    has_terminal = os.isatty(0)

    def on_hangup(_: int, frame: object) -> None:
        if has_terminal and not os.isatty(0):  # it was closed, and nobody is left to stop the worker
            on_signal(signal.SIGTERM, frame)
        else:
            worker.reloading.ask()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGHUP, on_hangup)
