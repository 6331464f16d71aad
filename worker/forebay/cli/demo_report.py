"""What the demo saw, and the summary of it. Pure: no Kafka, no terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from forebay.cli.demo_examples import Answer, Sample
from forebay.records import Reason


@dataclass(frozen=True, slots=True)
class Arrival:
    """A result, or an error result, as it arrived. Times are of the demo's monotonic clock.

    `alone` says that nothing else was under way. `batch_size` is what the worker says about the batch.
    """

    sample: Sample
    alone: bool
    sent_at: float
    arrived_at: float
    batch_size: int | None
    answer: Answer | None
    error: str | None = None

    @property
    def latency_ms(self) -> float:
        """From publishing the request to seeing its result."""
        return (self.arrived_at - self.sent_at) * 1000

    @property
    def is_right(self) -> bool:
        """Whether the answer is one of the right ones."""
        return self.answer is not None and self.answer.label in self.sample.right


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of some requests, in milliseconds."""

    requests: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The demo in numbers. `throughput` counts the requests that were sent at once, per second.

    `batches` maps a size to the number of batches that had it, `cuts` a reason to the number of batches it cut. Where
    the model runs in steps a batch is one request's run, and its size that of its last step.
    """

    requests: int
    results: int
    errors: int
    duplicates: int
    right: int
    originals: int
    originals_right: int
    throughput: float | None
    alone: Latency | None
    together: Latency | None
    batches: Mapping[int, int]
    cuts: Mapping[str, int]
    broker: str

    @property
    def troubles(self) -> list[str]:
        """What kept this from being all right, in words: a missing result, an error, a duplicate, a wrong answer."""
        counts = (
            (self.requests - self.results - self.errors, "without a result"),
            (self.errors, "with an error"),
            (self.duplicates, "answered twice"),
            (self.originals - self.originals_right, "unmodified, without the right answer"),
        )
        return [f"{count} {what}" for count, what in counts if count]

    @property
    def all_right(self) -> bool:
        """Whether each request got its result, once, and each unmodified input its right answer."""
        return not self.troubles

    @property
    def runs_in_steps(self) -> bool:
        """Whether requests joined and left between two steps."""
        return Reason.STEP in self.cuts

    @property
    def mean_batch_size(self) -> float:
        """Rows per batch, over batches."""
        count = sum(self.batches.values())
        return sum(size * number for size, number in self.batches.items()) / count if count else 0.0


def summarise(
    samples: Sequence[Sample],
    arrivals: Sequence[Arrival],
    duplicates: int,
    cuts: Mapping[str, int],
    broker: str,
) -> Summary:
    """Sum up what arrived for `samples`."""
    results = [arrival for arrival in arrivals if arrival.answer is not None]
    alone = [arrival for arrival in results if arrival.alone]
    together = [arrival for arrival in results if not arrival.alone]
    return Summary(
        requests=len(samples),
        results=len(results),
        errors=len(arrivals) - len(results),
        duplicates=duplicates,
        right=sum(arrival.is_right for arrival in results),
        originals=sum(sample.original for sample in samples),
        originals_right=sum(arrival.is_right for arrival in results if arrival.sample.original),
        throughput=_throughput(together),
        alone=_latency(alone),
        together=_latency(together),
        batches=_batches(results, in_steps=Reason.STEP in cuts),
        cuts=dict(cuts),
        broker=broker,
    )


def _throughput(arrivals: Sequence[Arrival]) -> float | None:
    if not arrivals:
        return None
    seconds = max(a.arrived_at for a in arrivals) - min(a.sent_at for a in arrivals)
    return len(arrivals) / seconds if seconds > 0 else None


def _latency(arrivals: Sequence[Arrival]) -> Latency | None:
    if not arrivals:
        return None
    ordered = sorted(arrival.latency_ms for arrival in arrivals)
    return Latency(len(ordered), *(ordered[ceil(len(ordered) * share) - 1] for share in (0.5, 0.99)))


def _batches(arrivals: Sequence[Arrival], *, in_steps: bool) -> dict[int, int]:
    """Count batches by size: a batch of n rows shows up in n results of one row each, a run in steps in one."""
    seen = Counter(arrival.batch_size for arrival in arrivals if arrival.batch_size)
    return {size: count if in_steps else round(count / size) for size, count in sorted(seen.items())}
