"""Dispatch: between the batchers and the pool. When is a replica free, is more to come, what did the model take.

The corridor's thread runs it. It knows the batching and the inference room, as the corridor does, and no Kafka.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from forebay.batching.batcher import Batcher
from forebay.breaker import Breakers
from forebay.custody import Custody
from forebay.inference.matching import Finished
from forebay.inference.pool import Pool
from forebay.observe import Observer
from forebay.records import Code, Failure, Reason, Request
from forebay.turns import Turns

_PASSED = "the deadline passed before the request ran"
_TOO_LATE = "the deadline passed before the request had run to its end"


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
        self._turns = Turns(batchers, pool, breakers)
        for model in batchers:
            self._seed(model)

    def renew(self, model: str) -> None:
        """Forget what was measured of a model: another one serves under its name, and was measured at its start."""
        self._batchers[model].curve.forget()
        self._batchers[model].caps.forget()
        self._seed(model)

    def _seed(self, model: str) -> None:
        for bucket, rows, seconds in self._pool.curves.get(model, ()):
            self._batchers[model].curve.seed([(rows, seconds)], bucket)

    def take_back(self, model: str, unwanted: Callable[[Request], bool]) -> list[Request]:
        """Remove and return the waiting requests of a model that `unwanted` picks."""
        return self._batchers[model].drop(unwanted)

    def expired(self, now: float) -> Iterator[tuple[Request, Failure]]:
        """Remove and yield the requests that cannot be answered by their deadline, waiting or staged."""
        for batcher in self._batchers.values():
            for request in batcher.expire(now):
                yield request, Failure(Code.DEADLINE_EXCEEDED, _why_late(request, now))
        for request in self._pool.expire(now):
            yield request, Failure(Code.DEADLINE_EXCEEDED, _TOO_LATE)

    def submit(self, now: float, *, draining: bool) -> None:
        """Cut the batches that are due and stage them at the replicas."""
        more = None
        self._pool.check_idle(now, self._breakers.is_open)
        for model in self._turns.order():
            batcher = self._batchers[model]
            while batcher.requests and (free_at := self._turns.free_at(model, now)) is not None:
                if not self._breakers.lets(model, now):
                    break
                if more is None:
                    more = True if self._more is None else self._more()
                batch = batcher.cut(now, free_at=free_at, draining=draining, more=more)
                if batch is None:
                    self._turns.passes(model)
                    break
                self._turns.began(model)
                self._pool.submit(batch, now)
                self._breakers.began(model, now)
                self._observer.cut(batch, now, batcher)

    def came_back(self, back: list[Finished], custody: Custody, now: float) -> list[Finished]:
        """Learn from batches that came back, and let their replicas go on; return those whose outcomes may leave."""
        leaving: list[Finished] = []
        for finished in back:
            self.learn(finished, now)
            if not self.holds(finished, custody, now):
                leaving.append(finished)
        if back:
            self.submit(now, draining=False)
        return leaving

    def holds(self, finished: Finished, custody: Custody, now: float) -> bool:
        """Whether a broken model has failed a batch: its requests wait again then, those that are still ours.

        Of one that is to be answered the spans are made, whose names its outcomes carry.
        """
        model, tells = finished.batch.model, finished.timings.total > 0
        held = self._breakers.holds(model, finished.unsound, tells=tells, now=now)
        self._observer.broken(self._breakers.changes)
        if held:
            self._observer.finished(finished, 0.0)
            for request, _ in finished.failures:
                if custody.keeps(request.record):
                    self._batchers[model].add(request)
        elif (tracing := self._observer.tracing) is not None:
            tracing.finished(finished, now)
        return held

    @property
    def stuck(self) -> int:
        """Requests that wait for a broken model."""
        return sum([batcher.requests for batcher in self.batchers if self._breakers.is_open(batcher.model)])

    def learn(self, finished: Finished, now: float) -> None:
        """Teach the batcher what a batch took and what the device's memory holds."""
        batch, timings = finished.batch, finished.timings
        self._turns.took(batch.model, timings.total)
        batcher = self._batchers.get(batch.model)
        if batcher is None or not timings.total or self._is_gone(finished):
            return
        if finished.last_rows or batch.reason is Reason.STEP:
            return  # how long other rows will run says nothing of the next one
        whole = timings.executions == 1 and not batch.answered  # not in parts, and nothing of it was skipped
        if whole and batch.reason is not Reason.ISOLATION:
            batcher.learned(batch, timings.total, now)
        batcher.caps.remember(batch.bucket, timings.cap)

    def _is_gone(self, finished: Finished) -> bool:
        """Whether a version that serves no more ran a batch: what it took says nothing of the one that does."""
        ran, serves = finished.signature, self._pool.signatures.get(finished.batch.model)
        return ran is not None and serves is not None and ran.version != serves.version

    def next_due(self, now: float) -> float | None:
        """Return when `submit` or `expired` may have something to do without a new arrival."""
        dues = [
            batcher.next_due(self._turns.free_at(model, now))
            for model, batcher in self._batchers.items()
            if not self._breakers.is_open(model)
        ]
        return min((due for due in dues if due is not None), default=None)

    def free_for(self, now: float) -> float:
        """Return the seconds for which no replica can begin anything new, as predicted."""
        free = [self._turns.free_at(model, now) for model in self._batchers]
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
