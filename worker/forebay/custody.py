"""What a worker holds: the records that it has read and not settled, from their ledger to the order of their results.

Pure bookkeeping for the corridor, on its thread. A record is taken when it was read, and given back when its outcome
is acknowledged, or when its partition belongs to somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Protocol

from forebay.inference.pool import Pool
from forebay.records import Outcome, Partition, Record, Request
from forebay.sections.delivery import Delivery
from forebay.stream.duplicates import Asked
from forebay.stream.lookback import lookback_of
from forebay.stream.member import Member
from forebay.stream.offsets import Offsets
from forebay.stream.order import Sequencer
from forebay.stream.outbox import Outgoing

FITS = 1_000_000
"""What fits while nothing is held: other bounds come first."""


class Queue(Protocol):
    """Where requests wait for their batch."""

    def __iter__(self) -> Iterator[Request]: ...
    def drop(self, unwanted: Callable[[Request], bool]) -> list[Request]: ...


class Custody:
    """The records of one worker between reading and settling."""

    def __init__(self, delivery: Delivery, consumer: Member, offsets: Offsets) -> None:
        self.offsets = offsets
        self.lookback = lookback_of(delivery, consumer)
        self.bytes = 0
        self.requests = 0
        self.closed = 0
        self._sequencer = Sequencer(delivery.order_of_results)
        self._in_order = delivery.order_of_results != "none"
        self._freed: list[Outcome] = []

    def assigned(self, partitions: Collection[Partition]) -> None:
        """Open the ledgers of newly assigned partitions."""
        self.offsets.assigned(partitions)
        if self.lookback is not None:
            self.lookback.assigned(partitions)

    def take(self, records: Iterable[Record]) -> list[Record]:
        """Take records that were read; return those that need an answer and whose partition is assigned."""
        taken = self.offsets.opened_all(records)
        if self._in_order:
            for record in taken:
                self._sequencer.opened(record)
        self.bytes += sum([len(record.value) for record in taken if record.value])
        self.requests += len(taken)
        return taken

    def give_back(self, record: Record) -> None:
        """Count a record out."""
        self.bytes -= len(record.value or b"")
        self.requests -= 1

    def keeps(self, record: Record) -> bool:
        """Whether a record is still this worker's; one that is not is counted out."""
        if self.offsets.holds(record):
            return True
        self.give_back(record)
        return False

    def fitting(self, limit: int) -> int:
        """Return how many more records, as large as those that are held, fit under `limit` bytes; at least one."""
        if not self.bytes:
            return FITS
        return max((limit - self.bytes) * self.requests // self.bytes, 1)

    def release(self, outcome: Outcome) -> list[Outcome]:
        """Return the outcomes whose turn has come; none where the partition belongs to somebody else by now."""
        if not self.offsets.holds(outcome.record):
            self.give_back(outcome.record)
            return []
        if not self._in_order:
            return [outcome]
        freed = self.take_freed()  # they stand before it in its line
        return [*freed, *self._sequencer.release(outcome)]

    def release_all(self, outcomes: Iterable[Outcome]) -> list[Outcome]:
        """Do the same for all outcomes of a batch."""
        if self._in_order:
            return [leaving for outcome in outcomes for leaving in self.release(outcome)]
        leaving = []
        for outcome in outcomes:
            if self.offsets.holds(outcome.record):
                leaving.append(outcome)
            else:
                self.give_back(outcome.record)
        return leaving

    def close(self, outcomes: Collection[Outcome]) -> None:
        """Close the positions of acknowledged outcomes."""
        records = [outcome.record for outcome in outcomes]
        self.closed += len(records)
        self.offsets.closed_all(records)
        self.bytes -= sum([len(record.value) for record in records if record.value])
        self.requests -= len(records)

    def pass_over(self, records: Collection[Record]) -> None:
        """Close the positions of records that get no outcome of their own: their id was answered already."""
        self.offsets.closed_all(records)
        self.bytes -= sum([len(record.value) for record in records if record.value])
        self.requests -= len(records)
        if self._in_order:
            self._freed += [leaving for record in records for leaving in self._sequencer.passed_over(record)]

    def take_freed(self) -> list[Outcome]:
        """Return the outcomes that had waited in their line for a record which was passed over since."""
        if not self._freed:
            return []
        freed, self._freed = self._freed, []
        return [outcome for outcome in freed if self.keeps(outcome.record)]

    @property
    def unanswered(self) -> int:
        """Records that are going to have an outcome of their own."""
        return self.requests - self.waiting

    @property
    def waiting(self) -> int:
        """Records that wait for the outcome of an earlier one with their id."""
        return 0 if self.lookback is None else self.lookback.duplicates.waiting

    def abandon(
        self,
        partitions: set[Partition],
        queues: Collection[Queue],
        pool: Pool,
        *,
        keep_overtaken: bool = False,
        last: bool = True,
    ) -> int:
        """Drop the requests of these partitions that no replica has begun; another worker will read them again.

        `queues` are all places where requests wait: the batchers, and the preparers, whose work begins nothing.
        `keep_overtaken` keeps those that wait below an offset which was begun or answered already (an urgent request,
        another shape, a malformed one): no watermark passes them, so what overtook them would be answered twice.
        `last` says that nothing of these partitions is going to be answered here: rows that run in steps stop.
        """

        def concerns(request: Request) -> bool:
            return (request.record.topic, request.record.partition) in partitions

        repeats: Iterable[Asked] = () if self.lookback is None else self.lookback.duplicates
        waiting = chain(pool.leftovers, *queues, repeats)
        floors = self._begun(partitions, waiting) if keep_overtaken else {}

        def is_above(request: Request) -> bool:
            record = request.record
            return concerns(request) and record.offset > floors.get((record.topic, record.partition), -1)

        gone = [request for queue in (pool, *queues) for request in queue.drop(is_above)]
        records = [request.record for request in gone]
        if last:
            pool.stop_steps(concerns)
        if self.lookback is not None:
            records += [asked.record for asked in self.lookback.duplicates.abandoned(records)]
        for record in records:
            self.offsets.abandoned(record)
            self.give_back(record)
        return len(records)

    def _begun(self, partitions: set[Partition], waiting: Iterable[Asked]) -> dict[tuple[str, int], int]:
        """Return the highest offset of each partition that is not among the waiting requests."""
        offsets: dict[tuple[str, int], set[int]] = {partition: set() for partition in partitions}
        for request in waiting:
            found = offsets.get((request.record.topic, request.record.partition))
            if found is not None:
                found.add(request.record.offset)
        return {place: self.offsets.highest_besides(place, found) for place, found in offsets.items()}

    def forget(self, partitions: set[Partition], outbox: Outgoing) -> None:
        """Forget what waits for its turn, or for a transaction, and close the ledgers."""
        outbox.keeps = self.keeps  # what the client has now may be refused later
        unsent = outbox.forget(partitions) if self.is_busy_with(partitions) else []
        for outcome in [*self._sequencer.forget(partitions), *unsent]:
            self.give_back(outcome.record)
        for asked in () if self.lookback is None else self.lookback.forgotten(partitions):
            self.give_back(asked.record)
        self.offsets.forgotten(partitions)

    def is_busy_with(self, partitions: set[Partition]) -> bool:
        """Whether something of these partitions is still going to be finished here."""
        return any(ledger.running for partition, ledger in self.offsets if partition in partitions)
