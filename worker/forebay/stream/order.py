"""Order of results: an outcome waits until those of all earlier records of its partition, or of its key, have left.

A place is taken when a record is read, so errors and expired requests keep theirs. Pure; the loop's thread owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Literal

from forebay.records import Outcome, Partition, Record


class Sequencer:
    """Lets outcomes leave in the order in which their records were read."""

    def __init__(self, ordering: Literal["none", "partition", "key"]) -> None:
        self._ordering = ordering
        self._queues: dict[Hashable, deque[tuple[int, int]]] = {}
        self._held: dict[tuple[str, int, int, int], Outcome | None] = {}

    def opened(self, record: Record) -> None:
        """Take a place for a record."""
        if self._ordering == "none":
            return
        line = self._line(record)
        queue = self._queues.get(line)
        if queue is None:
            queue = self._queues[line] = deque()
        queue.append((record.epoch, record.offset))

    def release(self, outcome: Outcome) -> list[Outcome]:
        """Return the outcomes that may leave now that `outcome` is there."""
        if self._ordering == "none":
            return [outcome]
        return self._leave(outcome.record, outcome)

    def passed_over(self, record: Record) -> list[Outcome]:
        """Return the outcomes that may leave now that `record` is known to get none."""
        return self._leave(record, None)

    def _leave(self, record: Record, outcome: Outcome | None) -> list[Outcome]:
        """Take `outcome` at a record's place, None for nothing; return those that may leave."""
        line = self._line(record)
        queue = self._queues.get(line)
        if queue is None:
            return []
        self._held[record.topic, record.partition, record.epoch, record.offset] = outcome
        leaving: list[Outcome] = []
        while queue:
            place = (record.topic, record.partition, *queue[0])
            if place not in self._held:
                return leaving
            found = self._held.pop(place)
            if found is not None:
                leaving.append(found)
            queue.popleft()
        del self._queues[line]
        return leaving

    def forget(self, partitions: Iterable[Partition]) -> list[Outcome]:
        """Drop the places of partitions that were taken away; return the outcomes that were still held."""
        gone = set(partitions)
        self._queues = {line: queue for line, queue in self._queues.items() if line[:2] not in gone}  # type: ignore[index]
        held = [outcome for key, outcome in self._held.items() if key[:2] in gone and outcome is not None]
        self._held = {key: outcome for key, outcome in self._held.items() if key[:2] not in gone}
        return held

    def _line(self, record: Record) -> Hashable:
        if self._ordering == "partition":
            return (record.topic, record.partition)
        return (record.topic, record.partition, record.key)
