"""Which offsets may be committed: one ledger per assigned partition. Pure; the loop's thread alone uses it.

A position is opened when its record was read and closed when every acknowledgement of its outcome has come.
The low watermark is the first open offset, so a commit never covers an unfinished record. Offsets need not be
consecutive: compaction and transaction markers leave gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator

from forebay.records import Partition, Record


class Ledger:
    """The open and finished offsets of one assignment of one partition.

    `epoch` tells this assignment from an earlier one of the same partition to the same worker.
    """

    __slots__ = ("_abandoned", "_finished", "_next", "_open", "committed", "epoch", "requested")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.committed: int | None = None
        self.requested: int | None = None
        self._open: deque[int] = deque()
        self._finished: set[int] = set()
        self._next: int | None = None
        self._abandoned = 0

    def opened(self, offset: int) -> None:
        """Note that the record at `offset` was read. Offsets come in increasing order."""
        self._open.append(offset)
        self._next = offset + 1

    def closed(self, offset: int) -> None:
        """Note that the record at `offset` has its outcome, acknowledged."""
        waiting = self._open
        if waiting and waiting[0] == offset:
            waiting.popleft()
            finished = self._finished
            while finished and waiting and waiting[0] in finished:
                finished.remove(waiting.popleft())
        else:
            self._finished.add(offset)

    def passed(self, offset: int) -> None:
        """Note that the consumer's position is `offset`, past markers or compacted records that it never saw."""
        if self._next is None or offset > self._next:
            self._next = offset

    @property
    def watermark(self) -> int | None:
        """The offset to commit: everything below it is finished. None before the first record."""
        return self._open[0] if self._open else self._next

    @property
    def position(self) -> int | None:
        """The offset behind what was read or passed. None before the first record."""
        return self._next

    @property
    def open_count(self) -> int:
        """Records that were read and are not finished."""
        return len(self._open) - len(self._finished)

    def highest_besides(self, waiting: Container[int]) -> int:
        """Return the highest open or overtaking offset that is not in `waiting`, -1 if there is none."""
        return next((offset for offset in reversed(self._open) if offset not in waiting), -1)

    def abandoned(self) -> None:
        """Note that one of the open records will not be finished here: it stays below no watermark."""
        self._abandoned += 1

    @property
    def running(self) -> int:
        """Open records that this worker is still going to finish."""
        return self.open_count - self._abandoned


class Offsets:
    """The ledgers of the partitions that are assigned now."""

    def __init__(self) -> None:
        self._ledgers: dict[tuple[str, int], Ledger] = {}
        self._epoch = 0

    def assigned(self, partitions: Iterable[Partition]) -> None:
        """Open a fresh ledger for each newly assigned partition."""
        self._epoch += 1
        for partition in partitions:
            self._ledgers[partition] = Ledger(self._epoch)

    def forgotten(self, partitions: Iterable[Partition]) -> None:
        """Drop the ledgers of partitions that belong to somebody else now."""
        for partition in partitions:
            self._ledgers.pop(partition, None)

    def opened(self, record: Record) -> bool:
        """Open a record's position and stamp it with its epoch; False if its partition is not assigned."""
        ledger = self._ledgers.get((record.topic, record.partition))
        if ledger is None:
            return False
        record.epoch = ledger.epoch
        ledger.opened(record.offset)
        return True

    def holds(self, record: Record) -> bool:
        """Whether a record's partition is still assigned as it was when the record was read."""
        ledger = self._ledgers.get((record.topic, record.partition))
        return ledger is not None and ledger.epoch == record.epoch

    def closed(self, record: Record) -> None:
        """Close a record's position, unless its partition belongs to somebody else by now."""
        ledger = self._ledgers.get((record.topic, record.partition))
        if ledger is not None and ledger.epoch == record.epoch:
            ledger.closed(record.offset)

    def highest_besides(self, partition: tuple[str, int], waiting: Container[int]) -> int:
        """Return the highest offset of a partition that was begun: open or answered, and not in `waiting`."""
        ledger = self._ledgers.get(partition)
        return -1 if ledger is None else ledger.highest_besides(waiting)

    def abandoned(self, record: Record) -> None:
        """Note that a record will not be finished here."""
        ledger = self._ledgers.get((record.topic, record.partition))
        if ledger is not None and ledger.epoch == record.epoch:
            ledger.abandoned()

    def passed(self, partition: Partition, offset: int) -> None:
        """Note that the consumer stands at `offset` of a partition."""
        if (ledger := self._ledgers.get(partition)) is not None:
            ledger.passed(offset)

    def committable(self, partitions: Iterable[Partition] | None = None) -> dict[Partition, int]:
        """Return the watermarks that go beyond what was last asked to be committed."""
        chosen: Iterable[tuple[str, int]] = self._ledgers
        if partitions is not None:
            chosen = [partition for partition in partitions if partition in self._ledgers]
        found: dict[Partition, int] = {}
        for partition in chosen:
            ledger = self._ledgers[partition]
            mark = ledger.watermark
            if mark is not None and mark != ledger.requested:
                found[Partition(*partition)] = mark
        return found

    def requested(self, marks: dict[Partition, int]) -> None:
        """Note that a commit of `marks` is on its way."""
        for partition, mark in marks.items():
            if (ledger := self._ledgers.get(partition)) is not None:
                ledger.requested = mark

    def committed(self, partition: Partition, mark: int) -> None:
        """Note that the broker has `mark`."""
        if (ledger := self._ledgers.get(partition)) is not None:
            ledger.committed = mark

    def refused(self, partition: Partition) -> None:
        """Note that a commit failed: the next settle asks again."""
        if (ledger := self._ledgers.get(partition)) is not None:
            ledger.requested = ledger.committed

    def __iter__(self) -> Iterator[tuple[Partition, Ledger]]:
        return ((Partition(*partition), ledger) for partition, ledger in self._ledgers.items())

    def __len__(self) -> int:
        return len(self._ledgers)
