"""Records that the client cannot read: damaged, or in a batch that does not decompress, or only to too much.

The client names the first offset of their batch, says nothing of its end, and repeats itself for ever. So the position
goes on by one offset at a time, and each of them is a record without a value, which gets its error: behind the last one
the client reads again. On the loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterable

import confluent_kafka as ck

from forebay.records import Partition, Record
from forebay.stream.codec import UNREADABLE

SKIPPED = {ck.KafkaError._BAD_COMPRESSION, ck.KafkaError._BAD_MSG, ck.KafkaError.INVALID_MSG}
"""Errors of a record, or of its batch, that would repeat themselves for ever."""


class Unreadable:
    """How far batches were passed over. `moved` are the partitions whose position the records at hand have moved."""

    def __init__(self) -> None:
        self._next: dict[Partition, int] = {}
        self.moved: set[Partition] = set()

    def pass_over(self, partition: Partition, first: int, why: str) -> Record:
        """Return the next record of a batch that begins at `first` and cannot be read."""
        offset = max(first, self._next.get(partition, 0))
        self._next[partition] = offset + 1
        self.moved.add(partition)
        return Record(partition.topic, partition.partition, offset, None, None, [(UNREADABLE, why.encode())], 0)

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Take in that partitions are read from somewhere else."""
        for partition in partitions:
            self._next.pop(partition, None)
