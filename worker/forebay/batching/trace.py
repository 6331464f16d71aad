"""What goes into a simulation and what comes out of it: arrivals, and what became of them. Pure values."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

DEFAULT_PRIORITY = 5


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come; `at` and `deadline` are seconds.

    `dims` are the dimensions of a row of each input, where some vary and are padded. Requests of different `kind` can
    never share a batch. `partition` is what fairness counts it to.
    """

    at: float
    rows: int = 1
    dims: tuple[tuple[int, ...], ...] = ()
    kind: int = 0
    priority: int = DEFAULT_PRIORITY
    deadline: float | None = None
    partition: int = 0


@dataclass(slots=True)
class Run:
    """What became of the arrivals. Times are seconds; `latencies` are of the answered ones, in order of arrival.

    `gaps` are, for each batch, how long a replica was idle while its oldest request waited. `unanswered` are requests
    that such a worker never cuts.
    """

    latencies: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    cuts: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    unanswered: int = 0
    busy: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    replicas: int = 1
    elements: int = 0
    computed_elements: int = 0

    @property
    def executions(self) -> int:
        """How many batches ran."""
        return len(self.sizes)

    @property
    def mean_batch(self) -> float:
        """Rows of a batch, on average."""
        return sum(self.sizes) / len(self.sizes) if self.sizes else 0.0

    @property
    def busy_share(self) -> float:
        """How much of the time a replica computed, averaged over the replicas."""
        span = self.ended - self.began
        return self.busy / (span * self.replicas) if span > 0 else 0.0

    @property
    def mean_latency(self) -> float:
        """Mean seconds from arrival to end."""
        return sum(self.latencies) / len(self.latencies) if self.latencies else 0.0

    @property
    def padding_efficiency(self) -> float:
        """Elements that were asked for over elements that were computed."""
        return self.elements / self.computed_elements if self.computed_elements else 1.0

    def quantile(self, q: float) -> float:
        """Return the latency that a share `q` of the requests did not exceed."""
        return quantile(sorted(self.latencies), q)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the smallest value that a share `q` of the sorted values does not exceed; 0 where there is none."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def poisson(rate: float, count: int, *, seed: int = 1, burst: int = 1) -> list[Arrival]:
    """Return `count` arrivals at `rate` per second with random gaps, `burst` of them at a time."""
    dice = random.Random(seed)
    now = 0.0
    arrivals: list[Arrival] = []
    while len(arrivals) < count:
        now += dice.expovariate(rate / burst)
        arrivals += [Arrival(now)] * min(burst, count - len(arrivals))
    return arrivals
