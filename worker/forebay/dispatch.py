"""Dispatch: between the batchers and the pool. When is a replica free, is more to come, what did the model take.

The corridor's thread runs it. It knows the batching and the inference room, as the corridor does, and no Kafka.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from forebay.batching.batcher import Batcher
from forebay.breaker import Breakers
from forebay.custody import Custody
from forebay.inference.pool import Pool
from forebay.inference.replicas import Finished
from forebay.observe import Observer
from forebay.records import Code, Failure, Reason, Request

_PASSED = "the deadline passed before the request ran"


class Dispatch:
    """Feeds the replicas of every model from its batcher.

    `more` says whether the topics are known to hold requests that were not read yet; None: nobody needs to know. A
    model whose breaker is open gets one batch at a time.
    """

    def __init__(
        self,
        batchers: dict[str, Batcher],
        pool: Pool,
        observer: Observer,
        breakers: Breakers,
        more: Callable[[], bool] | None = None,
    ) -> None:
        self._batchers = batchers
        self._pool = pool
        self._observer = observer
        self._breakers = breakers
        self._more = more
        for model, batcher in batchers.items():
            for bucket, rows, seconds in pool.curves.get(model, ()):
                batcher.curve.seed([(rows, seconds)], bucket)

    def expired(self, now: float) -> Iterator[tuple[Request, Failure]]:
        """Remove and yield the requests that cannot be answered by their deadline, waiting or staged."""
        for batcher in self._batchers.values():
            for request in batcher.expire(now):
                yield request, Failure(Code.DEADLINE_EXCEEDED, _why_late(request, now))
        for request in self._pool.expire(now):
            yield request, Failure(Code.DEADLINE_EXCEEDED, _PASSED)

    def submit(self, now: float, *, draining: bool) -> None:
        """Cut the batches that are due and stage them at the replicas."""
        more = None
        for model, batcher in self._batchers.items():
            while batcher.requests and (free_at := self._pool.free_at(model)) is not None:
                if not self._breakers.lets(model, now):
                    break
                if more is None:
                    more = True if self._more is None else self._more()
                batch = batcher.cut(now, free_at=free_at, draining=draining, more=more)
                if batch is None:
                    break
                self._pool.submit(batch, now)
                self._breakers.began(model, now)
                self._observer.cut(batch, now, batcher)

    def holds(self, finished: Finished, custody: Custody, now: float) -> bool:
        """Whether a broken model has failed a batch: its requests wait again then, those that are still ours."""
        model, tells = finished.batch.model, finished.timings.total > 0
        held = self._breakers.holds(model, finished.unsound, tells=tells, now=now)
        self._observer.broken(self._breakers.changes)
        if held:
            self._observer.finished(finished, 0.0)
            for request, _ in finished.failures:
                if custody.keeps(request.record):
                    self._batchers[model].add(request)
        return held

    @property
    def stuck(self) -> int:
        """Requests that wait for a broken model."""
        return sum([batcher.requests for batcher in self.batchers if self._breakers.is_open(batcher.model)])

    def learn(self, finished: Finished, now: float) -> None:
        """Teach the batcher what a batch took and what the device's memory holds."""
        batch, timings = finished.batch, finished.timings
        batcher = self._batchers.get(batch.model)
        if batcher is None or not timings.total:
            return
        whole = timings.executions == 1 and not batch.answered  # not in parts, and nothing of it was skipped
        if whole and batch.reason is not Reason.ISOLATION:
            batcher.learned(batch, timings.total, now)
        batcher.caps.remember(batch.bucket, timings.cap)

    def next_due(self) -> float | None:
        """Return when `submit` or `expired` may have something to do without a new arrival."""
        dues = [
            batcher.next_due(self._pool.free_at(model))
            for model, batcher in self._batchers.items()
            if not self._breakers.is_open(model)
        ]
        return min((due for due in dues if due is not None), default=None)

    def free_for(self, now: float) -> float:
        """Return the seconds for which no replica can begin anything new, as predicted."""
        free = [self._pool.free_at(model) for model in self._batchers]
        return min((at - now for at in free if at is not None), default=float("inf"))

    @property
    def batchers(self) -> Iterable[Batcher]:
        """The batchers, one per model."""
        return self._batchers.values()

    @property
    def waiting(self) -> int:
        """Requests that wait for a batch."""
        return sum([batcher.requests for batcher in self._batchers.values()])


def _why_late(request: Request, now: float) -> str:
    assert request.deadline is not None
    if request.deadline <= now:
        return _PASSED
    return f"the model would take longer than the {(request.deadline - now) * 1000:.0f} ms that were left"
