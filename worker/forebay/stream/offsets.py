"""Which offsets may be committed: one ledger per assigned partition. Pure; the loop's thread alone uses it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from forebay.records import Partition, Record
from forebay.stream.ledger import Ledger


class Offsets:
    """The ledgers of the partitions that are assigned now.

    `remembers` says whether commits tell what is finished ahead. `returning` has the attempts of suspects that an
    earlier owner noted and that were read just now, by their position; whoever lets them run takes them out.
    """

    def __init__(self) -> None:
        self.remembers = True
        self.returning: dict[tuple[str, int, int], int] = {}
        self._has_charges = False
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
        attempts = ledger.charges.meet(record)
        if attempts is not None:
            self.returning[record.topic, record.partition, record.offset] = attempts
            self._has_charges = True
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
            if ledger.recalled is None and ledger.charges.recalled is None:
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
        """Take over what an earlier owner of a newly assigned partition said beside its commit at `base`."""
        if (ledger := self._ledgers.get(partition)) is not None:
            ledger.recall(base, text)

    def suspect(self, charges: Iterable[tuple[Record, int]]) -> None:
        """Take over which requests are under suspicion now, and their attempts."""
        self._has_charges = True
        for ledger in self._ledgers.values():
            ledger.charges.known = {}
        for record, attempts in charges:
            ledger = self._ledgers[record.topic, record.partition]
            ledger.charges.known[record.offset] = (attempts, record.timestamp_ms)

    def is_open(self, record: Record) -> bool:
        """Whether a record is this worker's and has no acknowledged outcome yet."""
        ledger = self._ledgers.get((record.topic, record.partition))
        return ledger is not None and ledger.epoch == record.epoch and not ledger.has_finished(record.offset)

    @property
    def has_suspect_news(self) -> bool:
        """Whether a commit has yet to say which requests are under suspicion."""
        if not self._has_charges:
            return False
        all_charges = [ledger.charges for ledger in self._ledgers.values() if ledger.watermark is not None]
        news = any(charges.has_news for charges in all_charges)
        self._has_charges = news or any(charges.known for charges in all_charges)
        return news

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

        `with_news` adds those that stand where they stood, with more finished ahead of them or other suspects.
        """
        chosen: Iterable[tuple[str, int]] = self._ledgers
        if partitions is not None:
            chosen = [partition for partition in partitions if partition in self._ledgers]
        found: dict[Partition, int] = {}
        for partition in chosen:
            ledger = self._ledgers[partition]
            mark = ledger.watermark
            if mark is not None and (mark != ledger.requested or (with_news and self._has_news(ledger))):
                found[Partition(*partition)] = mark
        return found

    def _has_news(self, ledger: Ledger) -> bool:
        return (self.remembers and ledger.has_news) or ledger.charges.has_news

    def notes(self, marks: Mapping[Partition, int]) -> dict[Partition, str]:
        """Return what commits of these offsets say in their metadata, for the partitions where there is something."""
        found: dict[Partition, str] = {}
        for partition, mark in marks.items():
            ledger = self._ledgers.get(partition)
            note = None if ledger is None else ledger.note(mark, remembers=self.remembers)
            if note is not None:
                found[partition] = note
        return found

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
