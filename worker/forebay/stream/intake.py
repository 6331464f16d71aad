"""Back-pressure: how many records the loop takes, and when partitions are paused. The topic is the queue.

Pausing throws away what the client has prefetched, so a queue that is full for a moment is only not read; after a
second the partitions are paused, polled on, and resumed when half of the queue is free.
"""

from __future__ import annotations

from forebay import failpoints
from forebay.records import Record
from forebay.stream.member import Member
from forebay.stream.offsets import Offsets

PAUSE_AFTER = 1.0
"""Seconds for which a full queue is only not read."""

RECEIVE_AT_MOST = 1024
"""Records that one turn of the loop takes: what it decodes while a replica may have answered."""


class Intake:
    """Reads a consumer under a bound; `capacity` is the number of requests that the queue holds."""

    def __init__(self, consumer: Member, capacity: int) -> None:
        self._consumer = consumer
        self._capacity = capacity
        self._full_since: float | None = None

    def receive(self, room: int, fitting: int, wait: float, now: float) -> list[Record]:
        """Return at most `room` and `fitting` records; waits up to `wait` seconds for the first.

        Without room it keeps polling. `fitting` alone, the estimate of what memory takes, never pauses.
        """
        consumer = self._consumer
        if room <= 0:
            self._full_since = self._full_since or now
            if now - self._full_since < PAUSE_AFTER:
                return []
            if not consumer.paused:
                consumer.pause()
            return consumer.receive(1, 0.0)
        self._full_since = None
        if consumer.paused:
            if room * 2 < self._capacity:
                return consumer.receive(1, 0.0)
            consumer.resume()
        records = consumer.receive(min(room, fitting, RECEIVE_AT_MOST), wait)
        if records:
            failpoints.hit("after_receive")
        return records

    def more_to_come(self, offsets: Offsets) -> bool:
        """Whether partitions are known to hold records that were not read, by their ends as last fetched."""
        for partition, ledger in offsets:
            end = self._consumer.end_offset(partition)
            if end is not None and ledger.position is not None and end > ledger.position:
                return True
        return False
