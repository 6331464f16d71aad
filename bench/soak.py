"""Faults under load, one after the other, against the fake accelerator: `python bench/soak.py --seconds 600`.

Real Kafka, one `forebay run` with its input topic never empty, and a fault every `--every` seconds in turn: a row that
takes more memory than there is, one that the model refuses, one that ends its replica by a segmentation fault, by
os._exit, by a hang, and one that loses the device. Printed is whether every request has exactly its right outcome,
whether memory, staging segments and processes stayed as they were, and the throughput between faults (every replica is
ready) against that of the first fifth of the run, which has none. Exit code 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle, pairwise
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
SHARED_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class Sample:
    """The worker at one moment. `ready` says that every replica could take batches."""

    at: float
    answered: int
    ready: bool
    faulty: bool
    loop_bytes: int = 0
    replica_bytes: int = 0
    segments: int = 0
    processes: int = 0


@dataclass(slots=True)
class Traffic:
    """What was sent: ordinary requests by number, faults by id with the code that each must end in."""

    count: int = 0
    faults: dict[str, str] = field(default_factory=dict)


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


def look(job: Job, worker: WorkerProcess, replicas: int, *, faulty: bool) -> Sample:
    """Take a sample."""
    sample = Sample(time.monotonic(), job.answered(), False, faulty)
    sample.ready = worker.metric("forebay_replicas_ready") == replicas
    sample.loop_bytes = worker.parent_rss()
    children = worker.replicas()
    for child in children:
        try:
            sample.replica_bytes += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    sample.processes = len(children)
    sample.segments = sum(
        "forebay-staging" in str(link.readlink()) for link in Path(f"/proc/{worker.process.pid}/fd").iterdir()
    )
    return sample


def run(job: Job, seconds: float, every: float, replicas: int) -> tuple[Traffic, list[Sample], int]:
    """Play the run; return what was sent, the samples and the worker's exit code."""
    worker = start(job, replicas)
    traffic = Traffic()
    feeder = Feeder(job, traffic, 4_000)
    feeder.start()
    samples: list[Sample] = []
    began = time.monotonic()
    first_fault = began + seconds / 5
    next_fault, kinds, number = first_fault, cycle(KINDS.items()), 0
    while (now := time.monotonic()) < began + seconds:
        if now >= next_fault:
            kind, (value, code) = next(kinds)
            name = f"{kind} {number}"
            job.send([magic(name, value)])
            traffic.faults[name] = code
            next_fault, number = next_fault + every, number + 1
        samples.append(look(job, worker, replicas, faulty=now >= first_fault))
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


def rates(samples: list[Sample]) -> tuple[float, float, float]:
    """Return results per second without faults, between faults, and the share of time between faults."""
    calm: list[float] = []
    between: list[float] = []
    faulty = 0
    for before, after in pairwise(samples):
        rate = (after.answered - before.answered) / (after.at - before.at)
        faulty += after.faulty
        if not after.faulty:
            calm.append(rate)
        elif before.ready and after.ready:
            between.append(rate)
    mean_calm, mean_between = (statistics.fmean(rates) if rates else 0.0 for rates in (calm, between))
    return mean_calm, mean_between, len(between) / max(faulty, 1)


def growth(samples: list[Sample], kind: str) -> float:
    """Return the median of the last third over that of the second, where every replica was up."""
    values = [getattr(sample, kind) for sample in samples if sample.ready or kind == "loop_bytes"]
    third = max(len(values) // 3, 1)
    return statistics.median(values[-third:]) / max(statistics.median(values[third : 2 * third]), 1)


def report(job: Job, samples: list[Sample], traffic: Traffic, more: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the figures, and whether everything holds."""
    outcomes = job.outcomes()
    mistakes = wrong(traffic, outcomes)
    calm, between, share = rates(samples)
    figures: dict[str, Any] = {
        "requests": traffic.count + len(traffic.faults),
        "faults": dict(Counter(name.rsplit(" ", 1)[0] for name in traffic.faults)),
        "right outcomes": 1 - len(mistakes) / (traffic.count + len(traffic.faults)),
        "results/s without faults": round(calm),
        "results/s between faults": round(between),
        "ratio": round(between / calm, 3) if calm else 0.0,
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
    parser.add_argument("--seconds", type=float, default=600.0, help="how long; the first fifth has no faults")
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
