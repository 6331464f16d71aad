"""The end of a bounded run: what was in the topics at the start is committed, by this member or another."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.records import Partition
from forebay.stream.consumer import Member

_ASK_EVERY = 0.2
_ANSWER_SECONDS = 5.0


class Finish:
    """Asks now and then whether the group has committed every end offset."""

    def __init__(self, consumer: Member, ends: Mapping[Partition, int]) -> None:
        self._consumer = consumer
        self._ends = ends
        self._asked_at = 0.0

    def reached(self, now: float) -> bool:
        """Whether the group has committed all of them; asks the broker at most five times a second."""
        if now - self._asked_at < _ASK_EVERY:
            return False
        self._asked_at = now
        found = self._consumer.committed(list(self._ends), timeout=_ANSWER_SECONDS)
        return found is not None and all((found.get(partition) or 0) >= end for partition, end in self._ends.items())
