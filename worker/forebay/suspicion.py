"""Suspects from one worker to the next: what commits say of them, and how they run where they were read again.

Between the offsets and the pools, as the corridor is, on its thread. A request is suspect from the death of the replica
that ran it until its outcome is acknowledged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from forebay.batching.batcher import Batcher
from forebay.custody import Queue
from forebay.inference.pool import Pool
from forebay.inference.preparers import Preparers
from forebay.records import Record, Request
from forebay.stream.offsets import Offsets


class Suspicion:
    """The suspects of one worker."""

    def __init__(self, offsets: Offsets, pool: Pool, preparers: Preparers) -> None:
        self._offsets = offsets
        self._pool = pool
        self._preparers = preparers
        self._noted = False
        self._isolated: dict[int, Request] = {}

    def note(self) -> None:
        """Let the next commits say which requests are under suspicion now; costs nothing where there are none."""
        if self._noted or self._pool.leftovers.has_accused or self._preparers.pool.leftovers.has_accused:
            found = dict(self._found())
            self._offsets.suspect(found.values())
            self._noted = bool(found)

    def _found(self) -> Iterator[tuple[tuple[str, int, int], tuple[Record, int]]]:
        for pool in (self._preparers.pool, self._pool):
            for request, attempts in pool.leftovers.charges(lambda request: self._offsets.is_open(request.record)):
                yield _place(request.record), (request.record, attempts)

    def isolate(self, batchers: Collection[Batcher], now: float) -> None:
        """Take suspects out of the queues that they have just entered: they run alone, before anything new.

        Those are what an earlier owner of their partition noted, and what came from a preparer alone.
        """
        if self._offsets.returning:
            returning, self._offsets.returning = self._offsets.returning, {}
            queues: list[tuple[Queue, Pool]] = [(batcher, self._pool) for batcher in batchers]
            for queue, pool in [*queues, (self._preparers, self._preparers.pool)]:
                for request in queue.drop(lambda request: _place(request.record) in returning):
                    request.attempts = returning[_place(request.record)]
                    pool.leftovers.accuse(request, now)
        if self._preparers.pool.leftovers.has_accused:
            for batcher in batchers:
                for request in batcher.drop(self._came_from_a_preparer_alone):
                    self._isolated[id(request)] = request
                    self._pool.leftovers.accuse(request, now)
        elif self._isolated:
            self._isolated.clear()

    def _came_from_a_preparer_alone(self, request: Request) -> bool:
        """Whether a request is suspect and waits here for the first time, not because its model is broken."""
        return request.attempts > 0 and id(request) not in self._isolated


def _place(record: Record) -> tuple[str, int, int]:
    return record.topic, record.partition, record.offset
