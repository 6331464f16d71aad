"""The ledger of one partition: its open and finished offsets, and what its commits say. Pure; `offsets` has them all.

A position is opened when its record was read and closed when every acknowledgement of its outcome has come.
The low watermark is the first open offset, so a commit never covers an unfinished record. Offsets need not be
consecutive: compaction and transaction markers leave gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from itertools import islice

from forebay.records import Record
from forebay.stream import ahead, suspects

_BETWEEN = " / "
"""Between the parts of a commit's metadata; neither has it inside."""


class Ledger:
    """The open and finished offsets of one assignment of one partition.

    `epoch` tells this assignment from an earlier one of the same partition to the same worker. `recalled` is what an
    earlier owner has finished ahead of the committed offset, as long as it may still be met.
    """

    __slots__ = (
        "_abandoned", "_finished", "_next", "_noted", "_open", "charges", "committed", "epoch", "recalled", "requested",
    )  # fmt: skip

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
        self.charges = suspects.Charges()

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

    def note(self, mark: int, *, remembers: bool = True) -> str | None:
        """Return what a commit of `mark` has to say in its metadata: what is finished ahead, and who is suspect."""
        said = (self._ahead() if remembers else None, self.charges.note(mark, self._next))
        return _BETWEEN.join(part for part in said if part) or None

    def has_finished(self, offset: int) -> bool:
        """Whether a record that was opened has its outcome."""
        return offset in self._finished or not self._open or offset < self._open[0]

    def _ahead(self) -> str | None:
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

    def recall(self, base: int, text: str) -> None:
        """Take over what an earlier owner has said beside its commit at `base`."""
        for part in text.split(_BETWEEN):
            self.recalled = ahead.read(base, part) or self.recalled
            self.charges.recalled = suspects.read(base, part) or self.charges.recalled

    def asked(self, mark: int) -> None:
        """Note that a commit of `mark` is on its way, with what is finished ahead of it."""
        self.requested, self._noted = mark, len(self._finished)
        self.charges.asked()

    def refused(self) -> None:
        """Note that the commit on its way failed."""
        self.requested, self._noted = self.committed, -1
        self.charges.refused()

    def abandoned(self) -> None:
        """Note that one of the open records will not be finished here: it stays below no watermark."""
        self._abandoned += 1

    @property
    def running(self) -> int:
        """Open records that this worker is still going to finish."""
        return self.open_count - self._abandoned
