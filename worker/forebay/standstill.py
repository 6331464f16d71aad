"""The watchdog on progress: a loop that turns while nothing moves is not live, and has to be started again.

On the corridor's thread, twice a second. Outcomes that the client has taken and that nobody acknowledges, while the
brokers they go to are well, will not be acknowledged any more: a client that stands still after an outage looks like
that. During an outage the worker is not ready and stays live. Time counts as this process has lived it: one that was
frozen has not been waiting.
"""

from __future__ import annotations

from forebay.health import Health
from forebay.inference.pool import Pool
from forebay.stream.member import Member
from forebay.stream.outbox import Outgoing

ASK_AFTER_SECONDS = 30.0
"""Without an acknowledgement until the brokers are asked; a broker that takes long has the client's own time-outs."""

STUCK_AFTER_SECONDS = 120.0
"""Without an acknowledgement, and with brokers that are well, until the worker says that it is not live.

The client gives up a request after 30 s, a connection after 60 s, and tries again: by then it has done so once.
"""

_ASK_EVERY = 10.0
_ANSWER_SECONDS = 2.0
_LONGEST_STEP = 2.0


class Standstill:
    """Watches one worker."""

    def __init__(self, health: Health, consumer: Member) -> None:
        self._health = health
        self._consumer = consumer
        self._looked_at = 0.0
        self._closed = 0
        self._still = 0.0
        self._ask_at = 0.0

    def look(self, now: float, outbox: Outgoing, closed: int, pool: Pool) -> None:
        """Take in how many positions were `closed` since the start; tell what stands still."""
        self._health.stall("replica", pool.overdue(now))
        step, self._looked_at = min(now - self._looked_at, _LONGEST_STEP), now
        moves = closed != self._closed or not outbox.unacknowledged or outbox.is_refused
        self._closed = closed
        self._still = 0.0 if moves else self._still + step
        if self._still >= ASK_AFTER_SECONDS and now >= self._ask_at:
            self._ask_at = now + _ASK_EVERY
            if not self._consumer.reaches(outbox.topics, _ANSWER_SECONDS):
                self._still = 0.0  # an outage: what was taken before it may still be acknowledged after it
        stuck = self._still >= STUCK_AFTER_SECONDS
        told = (
            f"{outbox.unacknowledged} outcomes were not acknowledged for {self._still:.0f} s by brokers that answer: "
            "the Kafka client stands still, and a restart sends them again"
        )
        self._health.stall("delivery", told if stuck else None)
