"""What a worker holds: the records that it has read and not settled, from their ledger to the order of their results.

Pure bookkeeping for the corridor, on its thread. A record is taken when it was read, and given back when its outcome
is acknowledged, or when its partition belongs to somebody else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from forebay.batching.batcher import Batcher
from forebay.inference.pool import Pool
from forebay.records import Outcome, Partition, Record, Request
from forebay.stream.offsets import Offsets
from forebay.stream.order import Sequencer
from forebay.stream.outbox import Outgoing


class Custody:
    """The records of one worker between reading and settling."""

    def __init__(self, order_of_results: Literal["none", "partition", "key"]) -> None:
        self.offsets = Offsets()
        self.bytes = 0
        self.requests = 0
        self._sequencer = Sequencer(order_of_results)

    def take(self, record: Record) -> bool:
        """Take a record that was read; False where its partition is not assigned."""
        if not self.offsets.opened(record):
            return False
        self._sequencer.opened(record)
        self.bytes += len(record.value or b"")
        self.requests += 1
        return True

    def give_back(self, record: Record) -> None:
        """Count a record out."""
        self.bytes -= len(record.value or b"")
        self.requests -= 1

    def release(self, outcome: Outcome) -> list[Outcome]:
        """Return the outcomes whose turn has come; none where the partition belongs to somebody else by now."""
        if not self.offsets.holds(outcome.record):
            self.give_back(outcome.record)
            return []
        return self._sequencer.release(outcome)

    def close(self, outcomes: Iterable[Outcome]) -> None:
        """Close the positions of acknowledged outcomes."""
        for outcome in outcomes:
            self.offsets.closed(outcome.record)
            self.give_back(outcome.record)

    def abandon(self, partitions: set[Partition], batchers: Iterable[Batcher], pool: Pool) -> int:
        """Drop the requests of these partitions that no replica has begun; another worker will read them again."""

        def concerns(request: Request) -> bool:
            return (request.record.topic, request.record.partition) in partitions

        gone = [request for batcher in batchers for request in batcher.drop(concerns)]
        gone += pool.drop(concerns)
        for request in gone:
            self.offsets.abandoned(request.record)
            self.give_back(request.record)
        return len(gone)

    def forget(self, partitions: set[Partition], outbox: Outgoing) -> None:
        """Forget what waits for its turn, or for a transaction, and close the ledgers."""
        for outcome in [*self._sequencer.forget(partitions), *outbox.forget(partitions)]:
            self.give_back(outcome.record)
        self.offsets.forgotten(partitions)

    def is_busy_with(self, partitions: set[Partition]) -> bool:
        """Whether something of these partitions is still going to be finished here."""
        return any(ledger.running for partition, ledger in self.offsets if partition in partitions)
