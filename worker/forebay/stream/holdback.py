"""Outcomes that wait here while the brokers are silent, in place of piling up in the client.

What the client has cannot be called back: when partitions are lost in an outage it is still sent afterwards, and the
next owner answers the same requests again. What waits here is dropped instead. Bookkeeping of the outbox, on the loop's
thread; it sends nothing itself and knows no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from forebay.records import Outcome

FREE = 64
"""As many may be under way however long an acknowledgement takes."""

QUIET_SECONDS = 0.1
SILENT_SECONDS = 10.0
_MOST_AT_ONCE = 512
_FIRST_PROBE, _LONGEST_PROBE = 0.1, 1.0


class Holdback:
    """Says when to hold outcomes back: many are under way, and no report has come for a moment.

    One goes out now and then nevertheless: it may be a single topic that does not answer, and must hold up no other.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._waiting: deque[Outcome] = deque()
        self._silent = False
        self._heard_at = 0.0
        self._silence = 0.0
        self._probe_at = 0.0
        self._pause = _FIRST_PROBE

    def take(self, outcome: Outcome) -> None:
        """Let an outcome wait; ask only while `is_on`."""
        self._waiting.append(outcome)

    def due(self, now: float, under_way: int, *, heard: bool) -> list[Outcome]:
        """Return what may leave now, oldest first; `heard` says that a report has come since the last call."""
        if heard or not under_way:
            self._heard_at, self._pause = now, _FIRST_PROBE
        self._silence = now - self._heard_at
        self._silent = under_way >= FREE and self._silence > QUIET_SECONDS
        leaving = min(self._allowed(now), len(self._waiting))
        due = [self._waiting.popleft() for _ in range(leaving)]
        self.is_on = self._silent or bool(self._waiting)
        return due

    def _allowed(self, now: float) -> int:
        if not self._silent:
            self._probe_at = now + _FIRST_PROBE
            return _MOST_AT_ONCE
        if now < self._probe_at:
            return 0
        self._probe_at = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PROBE)
        return 1

    @property
    def trouble(self) -> str | None:
        """Say that brokers have been silent for long."""
        if self._silence <= SILENT_SECONDS:
            return None
        return f"the brokers have acknowledged nothing for {self._silence:.0f} s"

    def forget(self, partitions: Collection[tuple[str, int]]) -> list[Outcome]:
        """Drop and return what waits of partitions that belong to somebody else now."""
        dropped = [one for one in self._waiting if (one.record.topic, one.record.partition) in partitions]
        if dropped:
            self._waiting = deque(
                one for one in self._waiting if (one.record.topic, one.record.partition) not in partitions
            )
        return dropped
