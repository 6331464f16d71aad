"""What `forebay plan` computes: candidates, what each would do with the traffic, and which one to set. Pure arithmetic.

Every candidate runs through the worker's own batcher, in a simulation; one worker is simulated per GPU.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forebay.assembly import policy_of
from forebay.batching.simulation import Machine, simulate
from forebay.batching.trace import Arrival, Run, quantile
from forebay.cli.plan_curve import Measured
from forebay.cli.plan_traffic import Traffic
from forebay.settings import Batch

TOLERANCE = 1.02
"""Latencies closer than this are alike: then the one that keeps its replicas less busy is better."""

_ROOMY = 0.5
"""Load up to which traffic can double."""

_PROBED = 2_000
_PROBED_BATCHES = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try: `batch`, replicas of one worker, and GPUs with a worker each."""

    batch: Batch
    replicas: int = 1
    gpus: int = 1

    @property
    def servers(self) -> int:
        """How many replicas run in all."""
        return self.replicas * self.gpus

    def named(self) -> dict[str, Any]:
        """Return what tells it from the others, as settings."""
        waits = {"max_wait_ms": self.batch.max_wait_ms} if self.batch.dispatch == "linger" else {}
        return {"max_batch_size": self.batch.max_batch_size, "dispatch": self.batch.dispatch, **waits}

    @property
    def mode(self) -> str:
        """The dispatch mode with its wait."""
        return f"linger {self.batch.max_wait_ms:g} ms" if self.batch.dispatch == "linger" else self.batch.dispatch

    def __str__(self) -> str:
        """Say it in one line."""
        more = f", {self.replicas} replicas" if self.replicas > 1 else ""
        more += f", {self.gpus} GPUs" if self.gpus > 1 else ""
        return f"{self.mode}, up to {self.batch.max_batch_size} rows{more}"


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a candidate would do. Seconds; shares of one; requests per second, `peak` in the busiest second."""

    candidate: Candidate
    p50: float
    p99: float
    mean: float
    mean_batch: float
    busy: float
    rate: float
    peak: float
    capacity: float
    expired: int
    unanswered: int
    padding: float
    cuts: Counter[str] = field(default_factory=Counter)

    @property
    def load(self) -> float:
        """How much of what it can do is asked of it."""
        return self.rate / self.capacity if self.capacity else math.inf

    @property
    def lost(self) -> int:
        """Requests without a result."""
        return self.expired + self.unanswered

    @property
    def lags_at_peaks(self) -> bool:
        """Whether more comes for a while than it can answer, which it catches up with."""
        return self.keeps_up and self.peak > self.capacity

    @property
    def keeps_up(self) -> bool:
        """Whether it answers as fast as requests come, on average."""
        return self.load < 1 and not self.unanswered


@dataclass(frozen=True, slots=True)
class Advice:
    """What to set, and why; no estimate where nothing does what is asked."""

    estimate: Estimate | None
    reason: str


class Planner:
    """Estimates candidates for one curve; `overhead` is seconds per batch beside the model."""

    def __init__(self, curve: Measured, overhead: float, axes: Sequence[tuple[int, int]] = ()) -> None:
        self._curve = curve
        self._overhead = overhead
        self._axes = tuple(axes)
        self._capacities: dict[tuple[str, int], float] = {}

    def estimate(self, candidate: Candidate, traffic: Traffic, arrivals: Sequence[Arrival] | None = None) -> Estimate:
        """Replay the traffic (or other `arrivals` made from it) through a candidate."""
        replayed = traffic.arrivals if arrivals is None else arrivals
        seconds = replayed[-1].at - replayed[0].at
        dated = with_deadlines(replayed, candidate.batch.default_timeout_ms / 1000)
        runs = [self._run(candidate, share) for share in shares(dated, candidate.gpus)]
        latencies = sorted(latency for run in runs for latency in run.latencies)
        executions = sum(run.executions for run in runs)
        computed = sum(run.computed_elements for run in runs)
        ended = max(run.ended for run in runs)
        return Estimate(
            candidate,
            p50=quantile(latencies, 0.5),
            p99=quantile(latencies, 0.99),
            mean=sum(latencies) / max(len(latencies), 1),
            mean_batch=sum(sum(run.sizes) for run in runs) / max(executions, 1),
            busy=sum(run.busy for run in runs) / max((ended - replayed[0].at) * candidate.servers, 1e-9),
            rate=(len(replayed) - 1) / seconds,
            peak=traffic.peak() if arrivals is None and seconds > 2 else 0.0,
            capacity=self.capacity(candidate, traffic),
            expired=sum(run.expired for run in runs),
            unanswered=sum(run.unanswered for run in runs),
            padding=sum(run.elements for run in runs) / computed if computed else 1.0,
            cuts=sum((run.cuts for run in runs), Counter[str]()),
        )

    def capacity(self, candidate: Candidate, traffic: Traffic) -> float:
        """Return the most requests per second of such traffic: a backlog of it, through the same batcher."""
        key = (candidate.batch.model_dump_json(exclude={"dispatch", "max_wait_ms"}), candidate.replicas)
        if key not in self._capacities:
            rows = max(traffic.rows / len(traffic.arrivals), 1e-9)
            wanted = _PROBED_BATCHES * candidate.replicas * candidate.batch.max_batch_size / rows
            count = math.ceil(max(_PROBED, wanted))
            cycle = list(traffic.arrivals) * math.ceil(count / len(traffic.arrivals))
            backlog = [replace(arrival, at=0.0, deadline=None) for arrival in cycle[:count]]
            eager = candidate.batch.model_copy(update={"dispatch": "eager"})
            run = self._run(replace(candidate, batch=eager), backlog)
            self._capacities[key] = count / run.ended
        return self._capacities[key] * candidate.gpus

    def _run(self, candidate: Candidate, arrivals: Sequence[Arrival]) -> Run:
        machine = Machine(
            self._curve.service(),
            candidate.replicas,
            self._overhead,
            candidate.batch.queue_size,
            self._curve.known if self._axes else {0: self._curve.flat},
            self._axes,
        )
        return simulate(arrivals, policy_of(candidate.batch), machine)


def shares(arrivals: Sequence[Arrival], workers: int) -> list[Sequence[Arrival]]:
    """Divide arrivals among workers as the group does, by partition; without partitions by chance."""
    if workers == 1:
        return [arrivals]
    dice = random.Random(1)
    parted = any(arrival.partition for arrival in arrivals)
    divided: list[list[Arrival]] = [[] for _ in range(workers)]
    for arrival in arrivals:
        divided[arrival.partition % workers if parted else dice.randrange(workers)].append(arrival)
    return [share for share in divided if share]


def with_deadlines(arrivals: Sequence[Arrival], timeout: float) -> Sequence[Arrival]:
    """Give the arrivals that name no deadline the default one, where there is one."""
    if not timeout:
        return arrivals
    return [
        arrival if arrival.deadline is not None else replace(arrival, deadline=arrival.at + timeout)
        for arrival in arrivals
    ]


def candidates(
    batch: Batch, sizes: Sequence[int], dispatches: Sequence[str], waits: Sequence[float], *servers: Sequence[int]
) -> list[Candidate]:
    """Return the product; a wait matters to `linger` alone. `servers` are replicas and GPUs.

    Raises pydantic's ValidationError for a combination that a worker would refuse.
    """
    replicas, gpus = servers
    base = batch.model_dump()
    found = []
    for gpu_count in gpus:
        for replica_count in replicas:
            for size in sizes:
                for dispatch in dispatches:
                    for wait in waits if dispatch == "linger" else waits[:1]:
                        allowed = tuple(one for one in batch.allowed_batch_sizes if one <= size)
                        tried = {"max_batch_size": size, "dispatch": dispatch, "max_wait_ms": wait}
                        section = Batch(**base | tried | {"allowed_batch_sizes": allowed})
                        found.append(Candidate(section, replica_count, gpu_count))
    return found


def advise(estimates: Sequence[Estimate], target: float | None = None) -> Advice:
    """Choose what to set: the fewest replicas that keep up, then the least p99, or what `target` seconds cost least."""
    able = [estimate for estimate in estimates if estimate.keeps_up and not estimate.expired]
    if not able:
        return Advice(None, _why_none(estimates))
    if target is not None:
        meeting = [estimate for estimate in able if estimate.p99 <= target]
        if not meeting:
            least = min(able, key=lambda one: one.p99)
            return Advice(
                None,
                f"none keeps up with a p99 of at most {_ms(target)}; the least is {_ms(least.p99)}, by "
                f"{least.candidate}",
            )
        best = min(meeting, key=lambda one: (one.candidate.servers, *_plainness(one)))
        told = f"of {len(meeting)} that keep up with a p99 of at most {_ms(target)} it keeps its replicas least busy"
        return Advice(best, f"{told}: {best.busy:.0%} of the time, p99 {_ms(best.p99)}")
    fewest = min(estimate.candidate.servers for estimate in able)
    few = [estimate for estimate in able if estimate.candidate.servers == fewest]
    least = min(few, key=lambda one: one.p99)
    best = min((one for one in few if one.p99 <= least.p99 * TOLERANCE), key=_plainness)
    told = f"least p99 ({_ms(best.p99)}) of {len(few)} that keep up" if len(few) > 1 else "the only one that keeps up"
    if best.lags_at_peaks:
        told += ", though it lags at peaks"
    if fewest > min(estimate.candidate.servers for estimate in estimates):
        told += "; with fewer replicas none does"
    return Advice(best, told)


def _plainness(one: Estimate) -> tuple[int, bool, bool, int, float]:
    """Rank candidates of like latency: the less busy, the work-conserving, and the smallest batch with room to grow."""
    mode, size = one.candidate.batch.dispatch, one.candidate.batch.max_batch_size
    return round(one.busy * 40), mode != "eager", one.load > _ROOMY, size, one.p99


def _why_none(estimates: Sequence[Estimate]) -> str:
    most = max(estimates, key=lambda one: one.capacity)
    late = [estimate for estimate in estimates if estimate.keeps_up]
    if late:
        least = min(late, key=lambda one: one.expired)
        return f"each lets requests expire, at least {least.expired:,} ({least.candidate}): give them more time"
    needed = math.ceil(most.rate / (0.8 * most.capacity) * most.candidate.servers)
    return (
        f"none keeps up: {most.rate:,.0f} requests/s come, {most.candidate} answers at most {most.capacity:,.0f}; "
        f"try {needed} replicas or GPUs"
    )


def _ms(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2g} ms"
