"""The loop's pace: how long a turn may wait, for a record or for a replica, before the loop looks at everything again.

On the loop's thread, between the rooms like the corridor. A wait ends early by itself when what it waits for comes.
"""

from __future__ import annotations

from forebay.breaker import Breakers
from forebay.dispatch import Dispatch
from forebay.rooms import Rooms
from forebay.stream.outbox import Outgoing

IDLE_WAIT = 0.1
"""Seconds that an idle loop waits for a record; the only wait that a lone request never sees."""

BUSY_WAIT = 0.001
"""Seconds that the loop waits for a replica before it looks at Kafka again."""

_CALM_WAIT = 0.005
"""The same while every replica computes and everything is acknowledged: what comes now runs no sooner."""

_SETTLING_WAIT = 0.005


class Pace:
    """The waits of one worker's loop, in seconds."""

    def __init__(self, rooms: Rooms, outbox: Outgoing, dispatcher: Dispatch, breakers: Breakers) -> None:
        self._pool = rooms.pool
        self._preparers = rooms.preparers
        self._consumer = rooms.consumer
        self._outbox = outbox
        self._dispatcher = dispatcher
        self._breakers = breakers

    @property
    def awaits_replica(self) -> bool:
        """Whether a replica or preparer may answer at any moment, so that the loop must not sleep in the consumer."""
        return (
            self._pool.in_flight > 0 or self._pool.is_checking or self._preparers.requests > 0 or bool(self._breakers)
        )

    def for_record(self, now: float) -> float:
        """Return how long to wait for a record."""
        if self.awaits_replica:
            return 0.0
        settling = self._outbox.unacknowledged or self._consumer.commits_in_flight
        return self._until_due(now, _SETTLING_WAIT if settling else IDLE_WAIT)

    def for_replica(self, now: float) -> float:
        """Return how long to wait for a replica's answer."""
        if not self.awaits_replica:
            return 0.0
        wait = BUSY_WAIT
        if not (self._outbox.unacknowledged or self._preparers.requests or self._breakers):
            wait = max(min(_CALM_WAIT, self._dispatcher.free_for(now) - BUSY_WAIT), BUSY_WAIT)
        return self._until_due(now, wait)

    def _until_due(self, now: float, wait: float) -> float:
        """Shorten a wait to the moment at which a batch is due, or a request expires."""
        due = self._dispatcher.next_due(now)
        return wait if due is None else min(wait, max(due - now, 0.0))
