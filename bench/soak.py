"""Faults under load, one after the other, against the fake accelerator: `python bench/soak.py --seconds 600`.

Real Kafka, one `forebay run` with its input topic never empty, and a fault every `--every` seconds in turn: a row that
takes more memory than there is, one that the model refuses, one that ends its replica by a segmentation fault, by
os._exit, by a hang, and one that loses the device. After one of each there is a span without faults, and one at the
start. Printed is whether every request has exactly its right outcome, whether memory, staging segments and processes
stayed as they were, and the throughput between faults (every replica is ready, and each fault so far has its outcome: a
hang is one until it is noticed) against that of the spans without.
Exit code 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rig import broker

from tests.integration.job import Job, answer, ask, error_code, magic, rows
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import KafkaProbe, Read
from tests.magic import Magic

LOST = 2**26
KINDS = {
    "out of memory": (Magic.HOG, "resource_exhausted"),
    "poison row": (Magic.RAISE, "model_error"),
    "segfault": (Magic.SEGFAULT, "poisoned"),
    "os._exit": (Magic.EXIT, "poisoned"),
    "hang": (Magic.HANG, "poisoned"),
    "sticky error": (LOST, "poisoned"),
}
FLAT = 1.10
"""Memory in the last third of the run, against the third before it."""

AS_FAST = 0.95
_SURE = 3
"""Samples on both sides of one that have to agree that every replica is ready."""

SHARED_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class Sample:
    """The worker at one moment. `ready`: every replica could take batches; `after`: the kind of the last fault."""

    at: float
    answered: int
    ready: bool
    after: str | None
    loop_bytes: int = 0
    replica_bytes: int = 0
    segments: int = 0
    processes: int = 0


@dataclass(slots=True)
class Traffic:
    """What was sent: ordinary requests by number, faults by id with the code that each must end in, and when."""

    count: int = 0
    faults: dict[str, str] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)


class Feeder(threading.Thread):
    """Keeps the input ahead of the worker by `backlog` requests."""

    def __init__(self, job: Job, traffic: Traffic, backlog: int) -> None:
        super().__init__(daemon=True)
        self._job, self._traffic, self._backlog = job, traffic, backlog
        self._stopping = threading.Event()

    def run(self) -> None:
        """Send chunks until `stop`."""
        while not self._stopping.wait(0.05):
            if self._traffic.count - self._job.answered() < self._backlog:
                chunk = range(self._traffic.count, self._traffic.count + self._backlog // 4)
                self._job.send(map(ask, chunk))
                self._traffic.count = chunk.stop

    def stop(self) -> None:
        """Send no more."""
        self._stopping.set()
        self.join()


def start(job: Job, replicas: int) -> WorkerProcess:
    """Start the worker on the fake accelerator."""
    return job.start(
        model__factory="tests.models:Double",
        model__options={"seconds": 0.01},
        inference__device=f"fake:0?sticky={LOST}",
        inference__replicas=replicas,
        inference__execution_timeout_ms=8_000,
        inference__canary_interval_ms=2_000,
        inference__max_restarts=20,
        inference__threads=1,
        batch__max_batch_size=16,
        delivery__max_attempts=2,
    )


def look(job: Job, worker: WorkerProcess, replicas: int, after: str | None) -> Sample:
    """Take a sample."""
    sample = Sample(time.time(), job.answered(), False, after)
    sample.ready = worker.metric("forebay_replicas_ready") == replicas
    sample.loop_bytes = worker.parent_rss()
    children = worker.replicas()
    for child in children:
        try:
            sample.replica_bytes += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    sample.processes = len(children)
    sample.segments = staging_segments(worker.process.pid)
    return sample


def staging_segments(pid: int) -> int:
    """Count a process' open staging segments; a descriptor may be closed while they are counted."""
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += "forebay-staging" in str(link.readlink())
    return count


def run(job: Job, seconds: float, every: float, replicas: int) -> tuple[Traffic, list[Sample], int]:
    """Play the run; return what was sent, the samples and the worker's exit code."""
    worker = start(job, replicas)
    traffic = Traffic()
    feeder = Feeder(job, traffic, 4_000)
    feeder.start()
    samples: list[Sample] = []
    end = time.time() + seconds
    next_fault, kinds, last = time.time() + 2 * every, cycle([*KINDS.items(), None]), None
    while (now := time.time()) < end:
        if now >= next_fault:
            next_fault += every
            fault, last = next(kinds), None
            if fault is None:
                next_fault += every
            else:
                last, (value, code) = fault
                name = f"{last} {len(traffic.faults)}"
                job.send([magic(name, value)])
                traffic.faults[name] = code
                traffic.sent[name] = now
        samples.append(look(job, worker, replicas, last))
        time.sleep(0.5)
    feeder.stop()
    job.await_settled(600)
    return traffic, samples, worker.stop()


def wrong(traffic: Traffic, outcomes: list[Read]) -> list[str]:
    """Return what is wrong with the outcomes: each request has exactly one, and it is the right one."""
    found: list[str] = []
    seen = Counter((outcome.key or b"").decode() for outcome in outcomes)
    expected = {*map(str, range(traffic.count)), *traffic.faults}
    found += [f"{name} has no outcome" for name in expected - seen.keys()]
    found += [f"{name} was never sent" for name in seen.keys() - expected]
    found += [f"{name} has {count} outcomes" for name, count in seen.items() if count > 1]
    for outcome in outcomes:
        name = (outcome.key or b"").decode()
        if name in traffic.faults:
            if error_code(outcome) != traffic.faults[name]:
                found.append(f"{name} is {error_code(outcome)}, not {traffic.faults[name]}")
        elif outcome.header("status") != b"ok":
            found.append(f"{name} is {error_code(outcome)}")
        elif name.isdigit() and (answer(outcome) != rows(int(name)) * 2 + 1).any():
            found.append(f"{name} has a wrong answer")
    return found


def faulty_spans(traffic: Traffic, outcomes: list[Read]) -> list[tuple[float, float]]:
    """Return from when to when each fault was on its way: until it has its outcome."""
    ended = {(outcome.key or b"").decode(): outcome.timestamp_ms / 1000 for outcome in outcomes}
    return [(sent, ended.get(name, float("inf"))) for name, sent in traffic.sent.items()]


def rates(samples: list[Sample], faulty: list[tuple[float, float]]) -> dict[str | None, list[float]]:
    """Return results per second by the kind of the last fault, None without, where nothing was wrong for long.

    The worker's gauge of replicas is a second old at times, so that a sample counts only among others that say so.
    """
    found: dict[str | None, list[float]] = {}
    for number in range(_SURE, len(samples) - _SURE):
        near = samples[number - _SURE : number + _SURE + 1]
        is_faulty = any(begin < near[-1].at and near[0].at < end for begin, end in faulty)
        if all(sample.ready for sample in near) and not is_faulty:
            before, after = samples[number - 1], samples[number]
            rate = (after.answered - before.answered) / (after.at - before.at)
            found.setdefault(after.after, []).append(rate)
    return found


def growth(samples: list[Sample], kind: str) -> float:
    """Return the median of the last third over that of the second, where every replica was up."""
    values = [getattr(sample, kind) for sample in samples if sample.ready or kind == "loop_bytes"]
    third = max(len(values) // 3, 1)
    return statistics.median(values[-third:]) / max(statistics.median(values[third : 2 * third]), 1)


def report(job: Job, samples: list[Sample], traffic: Traffic, more: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the figures, and whether everything holds."""
    outcomes = job.outcomes()
    mistakes = wrong(traffic, outcomes)
    found = rates(samples, faulty_spans(traffic, outcomes))
    calm = statistics.fmean(found.pop(None, [0.0]))
    between = [rate for kind in found.values() for rate in kind]
    share = len(between) / max(sum(sample.after is not None for sample in samples), 1)
    figures: dict[str, Any] = {
        "requests": traffic.count + len(traffic.faults),
        "faults": dict(Counter(name.rsplit(" ", 1)[0] for name in traffic.faults)),
        "right outcomes": 1 - len(mistakes) / (traffic.count + len(traffic.faults)),
        "results/s without faults": round(calm),
        "results/s between faults": round(statistics.fmean(between or [0.0])),
        "ratio": round(statistics.fmean(between or [0.0]) / calm, 3) if calm else 0.0,
        "results/s after": {kind: round(statistics.fmean(rates)) for kind, rates in found.items()},
        "share of the time between faults": round(share, 2),
        "loop's memory, last third / second": round(growth(samples, "loop_bytes"), 3),
        "replicas' memory, last third / second": round(growth(samples, "replica_bytes"), 3),
        "staging segments": sorted({sample.segments for sample in samples}),
        **more,
    }
    for mistake in mistakes[:10]:
        print(f"  {mistake}", file=sys.stderr)
    holds = [
        not mistakes,
        figures["ratio"] >= AS_FAST,
        max(figures[name] for name in figures if "last third" in name) <= FLAT,
        len(figures["staging segments"]) == 1,
        figures["exit code"] == 0,
        not figures["processes left"],
        not figures["shared memory left"],
    ]
    return figures, all(holds)


def main() -> None:
    """Run, check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long")
    parser.add_argument("--every", type=float, default=15.0, help="seconds from one fault to the next")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave nothing running
    before = {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
    with broker() as address, tempfile.TemporaryDirectory() as folder:
        job = Job(KafkaProbe(address), Path(folder), partitions=4)
        try:
            traffic, samples, code = run(job, arguments.seconds, arguments.every, arguments.replicas)
            [worker] = job.workers
            after = {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
            restarts = len(worker.events("replica_lost"))
            more = {
                "replicas replaced": restarts,
                "exit code": code,
                "processes left": len(worker.replicas()),
                "shared memory left": sorted(name for name in after - before if "forebay" in name),
            }
            figures, holds = report(job, samples, traffic, more)
        finally:
            job.close()
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:42} {value}")
        print("everything holds" if holds else "NOT everything holds")
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
