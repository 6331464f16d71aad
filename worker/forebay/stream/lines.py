"""Outcomes that a broker has refused for now, and those that must not overtake them.

Where results keep an order, all later ones of the same line, a partition or a key, wait behind one that was refused.
The oldest of a line is tried alone; once it is acknowledged the others follow. Where there is no order every outcome is
a line of its own. Pure bookkeeping of the outbox, on the loop's thread; it sends nothing itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable
from itertools import count
from typing import Literal

from forebay.records import Code, Outcome

Due = list[tuple[Outcome, int]]
"""Outcomes to send now, each with the number of its tries so far."""


class _Line:
    """A line in which something was refused. `under_way` are the outcomes that were sent since, by identity."""

    __slots__ = ("alone", "is_timed", "under_way", "waiting")

    def __init__(self) -> None:
        self.waiting: list[tuple[int, int, Outcome, int]] = []
        self.under_way: set[int] = set()
        self.is_timed = False
        self.alone = False

    def take(self, number: int) -> Due:
        """Take the oldest `number` out, to be sent."""
        due = [heapq.heappop(self.waiting)[2:] for _ in range(min(number, len(self.waiting)))]
        self.under_way = {id(outcome) for outcome, _ in due}
        return due


class Lines:
    """The lines that are held up, by their key; `held` is empty as long as brokers take everything."""

    def __init__(self, ordering: Literal["none", "partition", "key"]) -> None:
        self._ordering = ordering
        self.held: dict[tuple[Hashable, ...], _Line] = {}
        self._sequence = count()

    def holds(self, outcome: Outcome) -> bool:
        """Whether a new outcome has to wait behind another; it does from now on."""
        if not self.held or (line := self.held.get(self._key(outcome))) is None:
            return False
        self._push(line, outcome, 0)
        return True

    def refused(self, outcome: Outcome, tries: int, *, alone: bool) -> Hashable | None:
        """Let a refused outcome wait; returns the line to `resume` after a pause, None where that is under way.

        `alone` sends the outcomes of the line one by one: together they are more than the topic takes.
        """
        key = self._key(outcome)
        line = self.held.setdefault(key, _Line())
        line.under_way.discard(id(outcome))
        line.alone = line.alone or alone
        self._push(line, outcome, tries)
        if line.is_timed:
            return None
        line.is_timed = True
        return key

    def resume(self, key: Hashable) -> tuple[Due, bool]:
        """Return the oldest outcome of a line, to be tried alone, and whether to ask again after a moment.

        That is so where others that were sent together with it have not come back yet: it must not overtake them.
        """
        line = self.held.get(key)  # type: ignore[call-overload]
        if line is None:
            return [], False
        if line.under_way:
            return [], True
        line.is_timed = False
        due = line.take(1)
        if not due:
            del self.held[key]  # type: ignore[arg-type]
        return due, False

    def acknowledged(self, outcome: Outcome) -> Due:
        """Take in that an outcome arrived; return those that may follow it now."""
        key = self._key(outcome)
        line = self.held.get(key)
        if line is None or id(outcome) not in line.under_way:
            return []
        line.under_way.remove(id(outcome))
        if line.under_way or line.is_timed:
            return []
        due = line.take(1 if line.alone else len(line.waiting))
        if not due:
            del self.held[key]
        return due

    def forget(self, partitions: Collection[tuple[str, int]]) -> list[Outcome]:
        """Drop and return what waits of partitions that belong to somebody else now.

        An outcome whose dead letter has left already stays, so that there are as many errors as dead letters.
        """
        dropped: list[Outcome] = []
        for key, line in self.held.items():
            if key[:2] in partitions:
                dropped += [waiting[2] for waiting in line.waiting if not has_letter(waiting[2])]
                line.waiting = [waiting for waiting in line.waiting if has_letter(waiting[2])]
                heapq.heapify(line.waiting)
        return dropped

    def _push(self, line: _Line, outcome: Outcome, tries: int) -> None:
        heapq.heappush(line.waiting, (outcome.record.offset, next(self._sequence), outcome, tries))

    def _key(self, outcome: Outcome) -> tuple[Hashable, ...]:
        record = outcome.record
        if self._ordering == "partition":
            return (record.topic, record.partition)
        return (record.topic, record.partition, record.key if self._ordering == "key" else record.offset)


def has_letter(outcome: Outcome) -> bool:
    """Whether a dead letter goes with an outcome."""
    return outcome.failure is not None and outcome.failure.code is not Code.DEADLINE_EXCEEDED
