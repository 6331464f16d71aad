"""The end of a bounded run: what was in the topics at the start is committed, by this member or another."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.breaker import Breakers
from forebay.errors import ModelBrokenError
from forebay.records import Partition
from forebay.stream.member import Member
from forebay.stream.offsets import Offsets

_ASK_EVERY = 0.2
_ANSWER_SECONDS = 5.0


class Finish:
    """Watches the end offsets of a bounded run; `offsets` are this member's part of them, `breakers` its models'."""

    def __init__(self, consumer: Member, ends: Mapping[Partition, int], offsets: Offsets, breakers: Breakers) -> None:
        self._consumer = consumer
        self._ends = ends
        self._offsets = offsets
        self._breakers = breakers
        self._asked_at = 0.0

    def has_read(self) -> bool:
        """Whether this member has read its partitions to their ends, so that nothing is worth waiting for."""
        return all((ledger.position or 0) >= self._ends.get(partition, 0) for partition, ledger in self._offsets)

    def reached(self, now: float) -> bool:
        """Whether the group has committed every end; asks the broker at most five times a second.

        Requests may go on arriving: only what was there at the start counts. Raises ModelBrokenError where a model has
        failed for so long that the end would never come.
        """
        if (why := self._breakers.hopeless()) is not None:
            raise ModelBrokenError(why)
        if now - self._asked_at < _ASK_EVERY or any(
            ledger.watermark is not None and (ledger.committed or 0) < self._ends.get(partition, 0)
            for partition, ledger in self._offsets
        ):
            return False
        self._asked_at = now
        found = self._consumer.committed(list(self._ends), timeout=_ANSWER_SECONDS)
        return found is not None and all((found.get(partition) or 0) >= end for partition, end in self._ends.items())
