"""What a member of a share group answers where others speak of offsets: there are none, the broker keeps the books.

Pure; on the loop's thread. The corridor asks all members the same things, and none of these answers sends it wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from forebay.records import Partition


class Offsetless:
    """The part of `member.Member` that means nothing in queue mode."""

    def commit(self, marks: dict[Partition, int], notes: Mapping[Partition, str] | None = None) -> None:
        """Do nothing: a share group commits no offsets."""

    def notes(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, tuple[int, str]]:
        """Return nothing: there are no offsets, and so no notes."""
        return {}

    def committed(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int | None] | None:
        """Return None: there are no offsets."""
        return None

    def offsets_at(self, times: Mapping[Partition, int], timeout: float) -> dict[Partition, int | None] | None:
        """Return None: there are no offsets."""
        return None

    def seek(self, partition: Partition, offset: int) -> None:
        """Do nothing: the broker decides what it lends."""

    def rewind(self, partitions: Iterable[Partition]) -> bool:
        """Do nothing: the broker lends again what is not acknowledged."""
        return True

    def reaches(self, topics: Iterable[str], timeout: float) -> bool:
        """Return False: a share consumer has no way to ask, so nobody knows."""
        return False

    def end_offset(self, partition: Partition) -> int | None:
        """Return None: the client does not say it."""
        return None
