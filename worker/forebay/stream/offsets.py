"""Which offsets may be committed: one ledger per assigned partition. Pure; the loop's thread alone uses it.

A position is opened when its record was read and closed when every acknowledgement of its outcome has come.
The low watermark is the first open offset, so a commit never covers an unfinished record. Offsets need not be
consecutive: compaction and transaction markers leave gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from itertools import islice

from forebay.records import Partition, Record
from forebay.stream import ahead


class Ledger:
    """The open and finished offsets of one assignment of one partition.

    `epoch` tells this assignment from an earlier one of the same partition to the same worker. `recalled` is what an
    earlier owner has finished ahead of the committed offset, as long as it may still be met.
    """

    __slots__ = ("_abandoned", "_finished", "_next", "_noted", "_open", "committed", "epoch", "recalled", "requested")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.committed: int | None = None
        self.requested: int | None = None
        self._open: deque[int] = deque()
        self._finished: dict[int, int] = {}  # with the timestamps of their records
        self._next: int | None = None
        self._abandoned = 0
        self._noted = 0
        self.recalled: ahead.Ahead | None = None

    def opened(self, offset: int) -> None:
        """Note that the record at `offset` was read. Offsets come in increasing order."""
        self._open.append(offset)
        self._next = offset + 1

    def closed(self, offset: int, stamp: int = 0) -> None:
        """Note that the record at `offset` has its outcome, acknowledged. `stamp` is the record's timestamp."""
        waiting = self._open
        if waiting and waiting[0] == offset:
            waiting.popleft()
            finished = self._finished
            while finished and waiting and waiting[0] in finished:
                del finished[waiting.popleft()]
        else:
            self._finished[offset] = stamp

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

    def is_finished(self, record: Record) -> bool:
        """Whether an earlier owner has finished this record, which was just read; what is in doubt is not."""
        recalled = self.recalled
        if recalled is None or record.offset < recalled.first:
            return False
        if not recalled.is_sure and record.offset == recalled.first and record.timestamp_ms == recalled.stamp:
            recalled.is_sure = True
        if not recalled.is_sure or record.offset > recalled.last:
            self.recalled = None
            return False
        return record.offset in recalled.offsets

    @property
    def has_news(self) -> bool:
        """Whether something ahead of the watermark was finished since the last commit was asked for."""
        return len(self._finished) != self._noted

    def note(self) -> str | None:
        """Return what is finished ahead of the watermark, as a commit's metadata; None where nothing is."""
        if not self._finished:
            return None
        finished, first = self._finished, -1
        found: list[int] = []
        for offset in islice(self._open, 1, ahead.SPAN):
            if offset in finished:
                first = offset if first < 0 else first
                found.append(offset)
        if first < 0:
            return None
        if self.recalled is not None and self.recalled.is_sure and self._next is not None:
            found += [offset for offset in self.recalled.offsets if offset >= self._next]
        return ahead.write(self._open[0], first, finished[first], found)

    def asked(self, mark: int) -> None:
        """Note that a commit of `mark` is on its way, with what is finished ahead of it."""
        self.requested, self._noted = mark, len(self._finished)

    def refused(self) -> None:
        """Note that the commit on its way failed."""
        self.requested, self._noted = self.committed, -1

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
        self.skipped = 0

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
        """Open a record's position and stamp it with its epoch.

        False if nothing is left to do for it: its partition is not assigned, or an earlier owner has finished it.
        """
        ledger = self._ledgers.get((record.topic, record.partition))
        if ledger is None:
            return False
        record.epoch = ledger.epoch
        ledger.opened(record.offset)
        if ledger.recalled is not None and ledger.is_finished(record):
            ledger.closed(record.offset, record.timestamp_ms)
            self.skipped += 1
            return False
        return True

    def opened_all(self, records: Iterable[Record]) -> list[Record]:
        """Do what `opened` does for records as they were read; return those for which something is left to do."""
        left: list[Record] = []
        topic, partition, ledger = "", -1, None
        for record in records:  # those of one partition mostly come together
            if record.partition != partition or record.topic != topic:
                topic, partition = record.topic, record.partition
                ledger = self._ledgers.get((topic, partition))
            if ledger is None:
                continue
            if ledger.recalled is None:
                record.epoch = ledger.epoch
                ledger.opened(record.offset)
                left.append(record)
            elif self.opened(record):
                left.append(record)
        return left

    def holds(self, record: Record) -> bool:
        """Whether a record's partition is still assigned as it was when the record was read."""
        ledger = self._ledgers.get((record.topic, record.partition))
        return ledger is not None and ledger.epoch == record.epoch

    def closed(self, record: Record) -> None:
        """Close a record's position, unless its partition belongs to somebody else by now."""
        self.closed_all((record,))

    def closed_all(self, records: Iterable[Record]) -> None:
        """Do what `closed` does for many records."""
        topic, partition, ledger = "", -1, None
        for record in records:
            if record.partition != partition or record.topic != topic:
                topic, partition = record.topic, record.partition
                ledger = self._ledgers.get((topic, partition))
            if ledger is not None and ledger.epoch == record.epoch:
                ledger.closed(record.offset, record.timestamp_ms)

    def recall(self, partition: Partition, base: int, text: str) -> None:
        """Take over what an earlier owner of a newly assigned partition had finished ahead of its commit at `base`."""
        if (ledger := self._ledgers.get(partition)) is not None:
            ledger.recalled = ahead.read(base, text)

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

    def committable(
        self, partitions: Iterable[Partition] | None = None, *, with_news: bool = False
    ) -> dict[Partition, int]:
        """Return the watermarks that go beyond what was last asked to be committed.

        `with_news` adds those that stand where they stood, with more finished ahead of them.
        """
        chosen: Iterable[tuple[str, int]] = self._ledgers
        if partitions is not None:
            chosen = [partition for partition in partitions if partition in self._ledgers]
        found: dict[Partition, int] = {}
        for partition in chosen:
            ledger = self._ledgers[partition]
            mark = ledger.watermark
            if mark is not None and (mark != ledger.requested or (with_news and ledger.has_news)):
                found[Partition(*partition)] = mark
        return found

    def notes(self, partitions: Iterable[Partition]) -> dict[Partition, str]:
        """Return what is finished ahead of the watermarks, for the partitions where something is."""
        found = {partition: self._ledgers[partition].note() for partition in partitions if partition in self._ledgers}
        return {partition: note for partition, note in found.items() if note is not None}

    def requested(self, marks: dict[Partition, int]) -> None:
        """Note that a commit of `marks` is on its way."""
        for partition, mark in marks.items():
            if (ledger := self._ledgers.get(partition)) is not None:
                ledger.asked(mark)

    def committed(self, partition: Partition, mark: int) -> None:
        """Note that the broker has `mark`."""
        if (ledger := self._ledgers.get(partition)) is not None:
            ledger.committed = mark

    def refused(self, partition: Partition) -> None:
        """Note that a commit failed: the next settle asks again."""
        if (ledger := self._ledgers.get(partition)) is not None:
            ledger.refused()

    def __iter__(self) -> Iterator[tuple[Partition, Ledger]]:
        return ((Partition(*partition), ledger) for partition, ledger in self._ledgers.items())

    def __len__(self) -> int:
        return len(self._ledgers)
