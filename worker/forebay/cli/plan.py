"""`forebay plan`: what batch limits, dispatch modes, replicas and GPUs would do with given traffic, without load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from forebay.cli.options import AsJson, Bootstrap, ConfigFile, SetValues, read_settings
from forebay.cli.plan_options import (
    OVERHEAD_MS,
    Burst,
    CurveFile,
    Dispatch,
    FromTopic,
    Gpus,
    MaxBatchSize,
    MaxWaitMs,
    Minutes,
    OverheadMs,
    Plot,
    Rate,
    Records,
    Replicas,
    Requests,
    SaveCurve,
    Seed,
    Speed,
    TargetLatencyMs,
    WhichModel,
    WorkerUrl,
    modes,
    numbers,
)
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.cli.plan_curve import Measured
    from forebay.cli.plan_topic import Seen
    from forebay.cli.plan_traffic import Traffic
    from forebay.cli.planning import Advice, Candidate, Estimate, Planner
    from forebay.settings import Batch, ModelSettings, Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)


def plan(
    from_topic: FromTopic = None,
    records: Records = 10_000,
    minutes: Minutes = None,
    speed: Speed = 1.0,
    rate: Rate = None,
    burst: Burst = 1,
    requests: Requests = 20_000,
    seed: Seed = 1,
    curve: CurveFile = None,
    url: WorkerUrl = None,
    save_curve: SaveCurve = None,
    model: WhichModel = None,
    max_batch_size: MaxBatchSize = None,
    dispatch: Dispatch = None,
    max_wait_ms: MaxWaitMs = None,
    replicas: Replicas = None,
    gpus: Gpus = "1",
    target_latency_ms: TargetLatencyMs = None,
    overhead_ms: OverheadMs = OVERHEAD_MS,
    plot: Plot = None,
    json: AsJson = False,
    bootstrap: Bootstrap = None,
    config: ConfigFile = None,
    values: SetValues = None,
) -> int:
    """Tell p50, p99, mean batch and busy share for batch limits, dispatch modes, replicas and GPUs, without load.

    Replays the arrival times of a topic, or of a rate, through the worker's own batcher, with the service times of the
    configured model (measured by a replica's warm-up), of a file or of a running worker. Every combination is one row
    of the table; below it is what to set. Reads without a group and commits nothing. Exits with 1 if nothing does it.
    """
    from forebay.cli.plan_curve import save
    from forebay.cli.plan_topic import as_traffic
    from forebay.cli.planning import Planner, advise

    settings = read_settings(config, values, {"kafka.bootstrap_servers": bootstrap})
    _verify(rate, from_topic, minutes, target_latency_ms)
    _verify_numbers(speed, overhead_ms)
    if plot is not None:
        _verify_plot(plot)
    tried = (numbers("--max-batch-size", max_batch_size, int), modes(dispatch), numbers("--max-wait-ms", max_wait_ms))
    servers = numbers("--replicas", replicas, int) or [settings.inference.replicas], numbers("--gpus", gpus, int) or [1]
    topic = from_topic or settings.kafka.input_topics[0]
    seen = None if rate is not None else _seen(settings, topic, (records, minutes), model, quiet=json)
    sizes = tried[0] or default_sizes(settings.batch)
    found = _curve(settings, (curve, url, model), max(sizes), config, quiet=json)
    if save_curve is not None:
        save(found, save_curve)
    sizes = tried[0] or fitting_sizes(sizes, settings.batch, found)
    traffic = _random(rate, requests, burst, seed) if seen is None else as_traffic(seen, topic, found.ragged, speed)
    planner = Planner(found, overhead_ms / 1000, traffic.axes)
    combinations = _combinations(settings.batch, sizes, tried[1], tried[2], servers)
    estimates = _estimates(planner, combinations, traffic, quiet=json)
    advice = advise(estimates, None if target_latency_ms is None else target_latency_ms / 1000)
    _show(traffic, found.noting(max(sizes)), estimates, advice, json=json)
    if plot is not None:
        _draw(plot, planner, traffic, found, (estimates, advice), quiet=json)
    return 0 if advice.estimate is not None else 1


def _show(traffic: Traffic, curve: Measured, estimates: Sequence[Estimate], advice: Advice, *, json: bool) -> None:
    import orjson

    from forebay.cli.plan_view import as_json, print_plan

    if json:
        typer.echo(orjson.dumps(as_json(traffic, curve, estimates, advice)).decode())
    else:
        print_plan(traffic, curve, estimates, advice)


def default_sizes(batch: Batch) -> list[int]:
    """Give the batch limits to try where none were named: as set, a quarter, four times."""
    return sorted({max(1, batch.max_batch_size // 4), batch.max_batch_size, 4 * batch.max_batch_size})


def fitting_sizes(sizes: Sequence[int], batch: Batch, curve: Measured) -> list[int]:
    """Leave out sizes far beyond what was measured, but never what is set."""
    return [size for size in sizes if size <= 2 * curve.largest or size == batch.max_batch_size]


def _verify(rate: float | None, topic: str | None, minutes: float | None, target: float | None) -> None:
    if rate is not None and topic is not None:
        raise UsageError("give either --rate or --from-topic")
    for option, value in (("--minutes", minutes), ("--target-latency-ms", target)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{option} takes a number above 0, not {value:g}")


def _verify_numbers(speed: float, overhead_ms: float) -> None:
    if not 1e-6 <= speed <= 1e6:
        raise UsageError(f"--speed takes 0.000001 to 1,000,000, not {speed:g}")
    if not 0 <= overhead_ms <= 3_600_000:
        raise UsageError(f"--overhead-ms takes milliseconds, 0 to 3,600,000, not {overhead_ms:g}")


def _verify_plot(path: Path) -> None:
    """Find out before a minute of work that nothing can be drawn."""
    if not path.resolve().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path}: name a .png, .svg or .pdf file")
    from forebay.cli.plan_plot import pyplot

    pyplot()


def _random(rate: float | None, count: int, burst: int, seed: int) -> Traffic:
    from forebay.cli.plan_traffic import from_rate

    return from_rate(rate or 0.0, count, burst, seed)


def _seen(
    settings: Settings, topic: str, newest: tuple[int, float | None], model: str | None, *, quiet: bool
) -> list[Seen]:
    from forebay.cli.plan_topic import from_topic, of_model
    from forebay.cli.progress import counting

    with counting(f"reading {topic}", quiet=quiet) as advance:
        found = from_topic(settings.kafka, topic, *newest, advance)
    if len(settings.served) < 2:
        return found
    return of_model(found, topic, _model(settings, model).name, settings.served[0].name)


def _curve(
    settings: Settings,
    given: tuple[Path | None, str | None, str | None],
    largest: int,
    config: Path | None,
    *,
    quiet: bool,
) -> Measured:
    from forebay.cli import plan_curve

    path, url, name = given
    if path is not None and url is not None:
        raise UsageError("give either --curve or --url")
    if path is not None:
        return plan_curve.read(path)
    if url is not None:
        return plan_curve.of_worker(url, name)
    search = [Path.cwd(), *([config.resolve().parent] if config is not None else [])]
    return plan_curve.measure(settings, _model(settings, name), largest, search, quiet=quiet)


def _model(settings: Settings, name: str | None) -> ModelSettings:
    served = settings.served
    if not served:
        raise UsageError(
            "there are no service times: configure a model (--config), or give --curve FILE or the --url of a worker"
        )
    found = next((one for one in served if name in (None, one.name)), None)
    if found is None:
        raise UsageError(f"no model {name} is configured, only {', '.join(one.name for one in served)}")
    return found


def _combinations(
    batch: Batch,
    sizes: Sequence[int],
    dispatches: Sequence[str],
    waits: Sequence[float],
    servers: tuple[Sequence[int], Sequence[int]],
) -> list[Candidate]:
    from pydantic import ValidationError

    from forebay.cli.planning import candidates

    tried = list(dict.fromkeys(dispatches or ("eager", "linger", batch.dispatch)))
    try:
        return candidates(batch, sizes, tried, waits or [batch.max_wait_ms or 5.0], *servers)
    except ValidationError as error:
        raise UsageError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error


def _estimates(planner: Planner, tried: Sequence[Candidate], traffic: Traffic, *, quiet: bool) -> list[Estimate]:
    from forebay.cli.progress import counting

    found = []
    with counting("simulating", len(tried), quiet=quiet) as advance:
        for candidate in tried:
            found.append(planner.estimate(candidate, traffic))
            advance(len(found))
    return found


def _draw(
    path: Path,
    planner: Planner,
    traffic: Traffic,
    curve: Measured,
    found: tuple[Sequence[Estimate], Advice],
    *,
    quiet: bool,
) -> None:
    from forebay.cli.plan_plot import MOST, STEPS, draw, lines
    from forebay.cli.progress import counting

    estimates, advice = found
    best = advice.estimate
    ranked = sorted(estimates, key=lambda one: (one is not best, not one.keeps_up, one.p99))
    shown = [one for one in estimates if one in ranked[:MOST]]
    with counting("drawing", len(shown) * len(STEPS), quiet=quiet) as advance:
        drawn = lines(planner, traffic, shown, advance)
    draw(path, drawn, traffic, curve, best.candidate if best is not None else None)
    if not quiet:
        typer.echo(f"drawn: {path}", err=True)
