"""The traffic that `forebay plan` replays: arrivals in order of time, faster or slower; or random ones at a rate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from forebay.batching.padding import Axes
from forebay.batching.trace import Arrival, poisson
from forebay.errors import UsageError

_BARS = "▁▂▃▄▅▆▇█"
_LEAST_RATE, _MOST_RATE, _MOST_BURST = 1e-6, 1e9, 100_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests to replay, in order of time, from 0. `source` says where they are from, `notes` what was assumed.

    `axes` are the dimensions of their inputs that are padded.
    """

    arrivals: Sequence[Arrival]
    source: str
    notes: list[str] = field(default_factory=list)
    axes: Axes = ()

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.arrivals[-1].at

    @property
    def rate(self) -> float:
        """Requests per second, on average."""
        return (len(self.arrivals) - 1) / self.seconds

    @property
    def rows(self) -> int:
        """Rows of all requests."""
        return sum(arrival.rows for arrival in self.arrivals)

    def peak(self, window: float = 1.0) -> float:
        """Return the most requests that came within one window, per second."""
        most = begin = 0
        for index, arrival in enumerate(self.arrivals):
            while self.arrivals[begin].at <= arrival.at - window:
                begin += 1
            most = max(most, index - begin + 1)
        return most / window

    def at_rate(self, rate: float, count: int | None = None) -> list[Arrival]:
        """Return the same arrivals (the first `count`), faster or slower, so that `rate` come per second."""
        return faster(self.arrivals[:count], rate / self.rate)

    def sparkline(self, width: int = 24) -> str:
        """Draw how the arrivals are spread over the time."""
        counts = Counter(min(int(arrival.at / self.seconds * width), width - 1) for arrival in self.arrivals)
        top = max(counts.values())
        return "".join(_BARS[math.ceil(counts[index] / top * 7)] for index in range(width))


def faster(arrivals: Iterable[Arrival], factor: float) -> list[Arrival]:
    """Return the arrivals `factor` times as fast; a deadline stays as far from its arrival as it was."""
    return [
        replace(
            arrival,
            at=arrival.at / factor,
            deadline=None if arrival.deadline is None else arrival.at / factor + arrival.deadline - arrival.at,
        )
        for arrival in arrivals
    ]


def from_rate(rate: float, count: int, burst: int, seed: int) -> Traffic:
    """Make random arrivals."""
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise UsageError(f"--rate takes {_LEAST_RATE:g} to {_MOST_RATE:g} requests per second, not {rate:g}")
    if burst > _MOST_BURST:
        raise UsageError(f"--burst takes up to {_MOST_BURST:,} requests at once, not {burst:,}")
    how = f"bursts of {burst}, " if burst > 1 else ""
    arrivals = poisson(rate, max(count, 2 * burst), seed=seed, burst=burst)
    start = arrivals[0].at
    shifted = [replace(arrival, at=arrival.at - start) for arrival in arrivals]
    return Traffic(shifted, f"{rate:,g} requests/s, {how}random gaps (seed {seed})")
