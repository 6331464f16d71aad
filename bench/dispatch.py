"""Static, linger and eager over a range of loads, on a real Kafka: `python bench/dispatch.py --plot FILE`.

A model that takes 20 ms and 1 ms for each row, at most 32 rows, is asked at random times whatever comes back (an open
loop). A latency counts from when a request should have left to when its result was read from Kafka. Beside it: how busy
the replica was, what a full backlog ran at, and what `forebay plan` foretells for the same arrivals. `eager, bound
early` is eager without late binding. `--rounds` repeats each load; `--json` prints the figures for programs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path

import confluent_kafka as ck
from rich.console import Console
from rich.table import Table
from rig import HERE, Topics, broker, environment, make_topics, median, worker_command
from throughput import binary_requests

from forebay.batching.policy import Policy
from forebay.batching.simulation import Machine, simulate
from forebay.batching.sizes import Bounds
from forebay.batching.trace import Arrival, quantile
from forebay.cli.scrape import scrape

LARGEST, FIXED_MS, ROW_MS, WAIT_MS = 32, 20.0, 1.0, 20.0
PEAK = LARGEST / ((FIXED_MS + ROW_MS * LARGEST) / 1000)
LOADS = (0.05, 0.25, 0.5, 0.75, 0.92)
WARM_UP = 0.5
BACKLOG = 36 * LARGEST
PATIENCE = 60.0
COLORS = {"static": "#D55E00", "linger": "#E69F00", "eager": "#0072B2", "eager, bound early": "#56B4E9"}


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to dispatch, and the program that runs it."""

    name: str
    settings: dict[str, object]
    program: str | None = None


MODES = (
    Mode("static", {"batch.dispatch": "static"}),
    Mode("linger", {"batch.dispatch": "linger", "batch.max_wait_ms": WAIT_MS}),
    Mode("eager, bound early", {"batch.dispatch": "eager"}, "early.py"),
    Mode("eager", {"batch.dispatch": "eager"}),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One mode at one load; milliseconds, and per second."""

    offered: float
    answered: float
    p50: float
    p99: float
    mean_batch: float
    busy: float
    planned_p50: float
    planned_p99: float


@dataclass(slots=True)
class Measured:
    """One mode: a point per load, and results per second out of a full backlog."""

    mode: str
    points: list[Point] = field(default_factory=list)
    backlog: float = 0.0


class Results:
    """Reads results as they come, in a thread: when each request's was there, and how large its batch was."""

    def __init__(self, address: str, topic: str) -> None:
        config = {"bootstrap.servers": address, "group.id": uuid.uuid4().hex, "fetch.wait.max.ms": 500}
        self._consumer = ck.Consumer(config)
        partitions = self._consumer.list_topics(topic).topics[topic].partitions
        self._consumer.assign([ck.TopicPartition(topic, number, ck.OFFSET_BEGINNING) for number in partitions])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.came: dict[int, tuple[float, int]] = {}

    def __enter__(self) -> Results:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._consumer.close()

    def _read(self) -> None:
        while not self._stop.is_set():
            result = self._consumer.poll(0.1)
            if result is None or result.error() is not None:
                continue
            headers = dict(result.headers() or [])
            if headers.get("status") != b"ok":
                raise SystemExit(f"a request failed: {result.value()!r}")
            self.came[int(result.key())] = (time.monotonic(), int(headers["batch-size"]))

    def wait(self, numbers: range) -> None:
        """Return when all of these have their results."""
        deadline = time.monotonic() + PATIENCE
        while any(number not in self.came for number in numbers):
            if time.monotonic() > deadline:
                raise SystemExit(f"no result of some of the requests {numbers} within {PATIENCE:.0f} s")
            time.sleep(0.01)

    def wait_for(self, count: int) -> None:
        """Return when so many have their results."""
        deadline = time.monotonic() + PATIENCE
        while len(self.came) < count:
            if time.monotonic() > deadline:
                raise SystemExit(f"{count - len(self.came)} results are missing after {PATIENCE:.0f} s")
            time.sleep(0.01)


class Asker:
    """Sends requests at random times, each by its number as key."""

    def __init__(self, address: str, topic: str) -> None:
        self._producer = ck.Producer({"bootstrap.servers": address, "linger.ms": 0})
        self._topic = topic
        self._value, self._headers = next(binary_requests(1))
        self.sent: list[float] = []

    def send(self, due: float) -> None:
        """Send one request that should leave at `due`."""
        number = len(self.sent)
        self.sent.append(due)
        self._producer.produce(self._topic, self._value, b"%d" % number, headers=self._headers)
        self._producer.poll(0)

    def flush(self) -> None:
        """See everything delivered."""
        self._producer.flush()

    def ask(self, per_second: float, seconds: float, dice: random.Random) -> range:
        """Send at random times for some seconds; returns the numbers of the requests."""
        first, due = len(self.sent), time.monotonic()
        end = due + seconds
        while (due := due + dice.expovariate(per_second)) < end:
            time.sleep(max(due - time.monotonic(), 0))
            self.send(due)
        return range(first, len(self.sent))


@contextlib.contextmanager
def worker(address: str, topics: Topics, mode: Mode) -> Iterator[str]:
    """Run a worker; yields the address of its metrics."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings: dict[str, object] = {
        "model.factory": "models:Timed",
        "model.options": {"fixed_ms": FIXED_MS, "row_ms": ROW_MS},
        "batch.max_batch_size": LARGEST,
        "inference.device": "cpu",
        "inference.threads": 1,
        "ops.port": port,
        **mode.settings,
    }
    command = worker_command(address, topics, settings)
    if mode.program is not None:
        command = [sys.executable, mode.program, *command[3:]]
    process = subprocess.Popen(command, cwd=HERE, env=environment())
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)


def measure(address: str, mode: Mode, loads: Sequence[float], seconds: float, rounds: int) -> Measured:
    """Measure one mode at every load, then out of a backlog. Of several rounds each figure's median counts."""
    topics, found = make_topics(address), Measured(mode.name)
    with worker(address, topics, mode) as url, Results(address, topics.results) as results:
        asker = Asker(address, topics.requests)
        start = time.monotonic()
        while not results.came:  # static answers nothing before a batch is full
            if time.monotonic() > start + PATIENCE:
                raise SystemExit(f"the worker answers nothing within {PATIENCE:.0f} s")
            asker.send(time.monotonic())
            time.sleep(0.1)
        for load in loads:
            tried = [_at_load(asker, results, url, mode, (load * PEAK, seconds)) for _ in range(rounds)]
            found.points.append(Point(*(median(figures) for figures in zip(*map(astuple, tried), strict=True))))
        found.backlog = _backlog(asker, results)
    return found


def _at_load(asker: Asker, results: Results, url: str, mode: Mode, load: tuple[float, float]) -> Point:
    per_second, seconds = load
    dice = random.Random(len(asker.sent))
    asker.ask(per_second, WARM_UP, dice)
    before, began = scrape(url), time.monotonic()
    asked = asker.ask(per_second, seconds, dice)
    after, ended = scrape(url), time.monotonic()
    if mode.name == "static":  # the last of them leave when others fill their batch
        while any(number not in results.came for number in asked):
            asker.ask(per_second, 0.1, dice)
    results.wait(range(len(asker.sent)) if mode.name != "static" else asked)
    latencies = sorted(results.came[number][0] - asker.sent[number] for number in asked)
    answered = sum(began <= when < ended for when, _ in list(results.came.values()))
    forward = [reading.total("forebay_batch_stage_seconds_sum", stage="forward") for reading in (before, after)]
    batches = sum(1 / results.came[number][1] for number in asked)
    planned = plan(mode, [asker.sent[number] for number in asked])
    return Point(
        offered=len(asked) / seconds,
        answered=answered / (ended - began),
        p50=quantile(latencies, 0.5) * 1000,
        p99=quantile(latencies, 0.99) * 1000,
        mean_batch=len(asked) / batches,
        busy=(forward[1] - forward[0]) / (after.at - before.at),
        planned_p50=planned[0] * 1000,
        planned_p99=planned[1] * 1000,
    )


def plan(mode: Mode, times: Sequence[float]) -> tuple[float, float]:
    """Foretell median and 99th percentile for these arrivals."""
    points = [(rows, (FIXED_MS + ROW_MS * rows) / 1000) for rows in (1, 2, 4, 8, 16, 32)]
    machine = Machine(lambda _, rows: (FIXED_MS + ROW_MS * rows) / 1000, overhead=0.0002, known={0: points})
    dispatch = str(mode.settings["batch.dispatch"])
    policy = Policy(Bounds(LARGEST, 1 << 30), dispatch, WAIT_MS / 1000)  # type: ignore[arg-type]
    if mode.program is not None:
        policy = Policy(Bounds(LARGEST, 1 << 30), lead=3600.0, lead_share=3600.0)
    run = simulate([Arrival(at - times[0]) for at in times], policy, machine)
    return run.quantile(0.5), run.quantile(0.99)


def _backlog(asker: Asker, results: Results) -> float:
    """Return results per second while a backlog lasts."""
    first = len(asker.sent)
    for _ in range(BACKLOG):
        asker.send(time.monotonic())
    asker.flush()
    results.wait_for(len(asker.sent) - len(asker.sent) % LARGEST)  # static keeps what fills no batch
    came = sorted(when for number, (when, _) in list(results.came.items()) if number >= first)
    came = came[LARGEST:]  # the first batch may hold earlier requests
    return (len(came) - LARGEST) / (came[-1] - came[0])


def show(found: Sequence[Measured]) -> None:
    """Print the table."""
    table = Table("mode", "asked/s", "answered/s", "p50 ms", "p99 ms", "batch", "busy", "planned p50", "planned p99")
    for one in found:
        for point in one.points:
            cells = (point.p50, point.p99, point.mean_batch)
            planned = (point.planned_p50, point.planned_p99)
            table.add_row(
                one.mode,
                f"{point.offered:.0f}",
                f"{point.answered:.0f}",
                *(f"{value:.1f}" for value in cells),
                f"{point.busy:.0%}",
                *(f"{value:.1f}" for value in planned),
            )
        share = one.backlog / PEAK
        table.add_row(one.mode, "backlog", f"{one.backlog:.0f}", "", "", "", f"{share:.0%}", "", "", end_section=True)
    Console(width=110).print(table)


def draw(found: Sequence[Measured], path: Path) -> None:
    """Draw latency over load, and below it the busy share and what a backlog ran at."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(10, 8.2), layout="constrained")
    latency, busy, full = figure.subplot_mosaic("AA;AA;BC").values()
    for one in found:
        color, offered = COLORS[one.mode], [point.offered for point in one.points]
        width = 2.8 if one.mode == "eager" else 1.8
        latency.plot(offered, [point.p99 for point in one.points], "o-", color=color, lw=width, ms=5, label=one.mode)
        latency.plot(offered, [point.p50 for point in one.points], "o--", color=color, lw=1, ms=3, alpha=0.75)
        busy.plot(offered, [100 * point.busy for point in one.points], "o-", color=color, lw=width, ms=4)
    latency.set_yscale("log")
    latency.set_ylabel("latency through Kafka, ms\n(bold: p99, dashed: p50)")
    plain = plt.FuncFormatter(lambda value, _: f"{value:g}")
    latency.yaxis.set_major_formatter(plain)
    latency.yaxis.set_minor_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}" if str(value)[0] in "25" else ""))
    latency.legend(frameon=False, loc="upper center", ncols=len(found))
    latency.set_title(
        f"A model of {FIXED_MS:g} ms + {ROW_MS:g} ms per row, up to {LARGEST} rows; linger waits {WAIT_MS:g} ms",
        loc="left",
        fontsize=11,
    )
    busy.set_ylabel("replica busy, %")
    busy.set_ylim(0, 105)
    full.barh([one.mode for one in found], [one.backlog for one in found], color=[COLORS[one.mode] for one in found])
    full.axvline(PEAK, color="black", lw=1, ls="--")
    full.set_xlim(0, PEAK * 1.12)
    full.set_title(f"full backlog, requests/s (dashed: the model alone, {PEAK:.0f})", loc="left", fontsize=9.5)
    for number, one in enumerate(found):
        full.text(one.backlog - 8, number, f"{one.backlog:.0f}", ha="right", va="center", color="white", fontsize=9)
    for axis in (latency, busy):
        axis.set_xlabel("requests per second")
        axis.set_xlim(0, PEAK)
    for axis in (latency, busy, full):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, axis="x" if axis is full else "both", which="both", alpha=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure every mode and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.5, help="measured at each load")
    parser.add_argument("--rounds", type=int, default=1, help="at each load; medians, against a noisy machine")
    parser.add_argument("--loads", type=float, nargs="*", default=LOADS, help="shares of what the model can answer")
    parser.add_argument("--modes", choices=list(COLORS), nargs="*", default=list(COLORS))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = []
    with broker() as address:
        for mode in (mode for mode in MODES if mode.name in arguments.modes):
            print(f"measuring {mode.name} …", file=sys.stderr, flush=True)
            found.append(measure(address, mode, arguments.loads, arguments.seconds, arguments.rounds))
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        show(found)
    if arguments.plot is not None:
        draw(found, arguments.plot)


if __name__ == "__main__":
    main()
