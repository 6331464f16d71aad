"""Whether each replica still computes what it should: canaries while it is idle, and doubts while its batches fail.

The pool drives it on the loop's thread. A replica whose batch failed whole, and its model's example with it, is
doubted as long as others serve the model: it gets nothing, and its batch runs elsewhere. Where the next batch of
another replica works, the doubted one is broken; where it fails as well, the model is: the breaker's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from forebay.inference.matching import Finished
from forebay.inference.messages import Checked
from forebay.inference.replicas import Replica, State
from forebay.records import Batch

_LOOKS_PER_INTERVAL = 10
_FAILURES_ALONE = 2
"""Canaries in a row that the only replica of a model may fail with an error: what is broken may be outside of it."""

Broken = list[tuple[Replica, str]]


@dataclass(slots=True)
class Doubt:
    """Why a replica is doubted. `earlier` are the batches that others were running by then: they prove nothing."""

    why: str
    earlier: set[int]


class Soundness:
    """Judges the replicas of one pool. One that was idle for `interval` seconds is checked; 0: never."""

    def __init__(self, interval: float, numbers: Iterator[int]) -> None:
        self._interval = interval
        self._numbers = numbers
        self._look_at = 0.0

    def due(
        self, replicas: Sequence[Replica], now: float, spared: Callable[[str], bool]
    ) -> list[tuple[Replica, Batch]]:
        """Return the replicas to check now, each with the empty batch that stands for its canary."""
        if not self._interval or now < self._look_at:
            return []
        self._look_at = now + self._interval / _LOOKS_PER_INTERVAL
        return [
            (replica, Batch.canary(next(self._numbers), replica.model, now))
            for replica in replicas
            if replica.is_idle and now - replica.idle_since >= self._interval and not spared(replica.model)
        ]

    def judge(self, replica: Replica, checked: Checked, replicas: Sequence[Replica]) -> str:
        """Take in what a canary came to; return why the replica is broken, empty where it is not."""
        if checked.wrong:
            replica.distrust()
            return f"its canary: {checked.wrong}"
        replica.failures = replica.failures + 1 if checked.failed else 0
        if checked.failed and (_others(replica, replicas) or replica.failures >= _FAILURES_ALONE):
            return f"its canary failed: {checked.failed}"
        return ""

    def weigh(self, replica: Replica, finished: Finished, replicas: Sequence[Replica]) -> tuple[bool, Broken]:
        """Take in a batch that came back; return whether it counts, and which replicas it proves to be broken."""
        if not finished.unsound:
            replica.doubt, replica.failures, replica.deaths = None, 0, 0
            number = finished.batch.number
            proven = [one for one in replicas if one.model == replica.model and one.doubt is not None]
            return True, [(one, _why(one)) for one in proven if one.doubt and number not in one.doubt.earlier]
        others = _others(replica, replicas)
        if others:
            earlier = {batch.number for other in others for batch, _ in other.running}
            replica.doubt = Doubt(finished.unsound, earlier)
            return False, []
        for one in replicas:
            if one.model == replica.model:
                one.doubt = None
        return True, []


def _others(replica: Replica, replicas: Sequence[Replica]) -> list[Replica]:
    """Return the replicas of the same model that nothing speaks against."""
    return [
        one
        for one in replicas
        if one is not replica and one.model == replica.model and one.state is State.READY and one.doubt is None
    ]


def _why(replica: Replica) -> str:
    assert replica.doubt is not None
    return f"it fails the model's example, which other replicas run: {replica.doubt.why}"
