"""Looks back: where a partition is assigned, the ids of the last window are read from it again before anything else.

The consumer that reads the partition is sent back by one window at its first record, and what lies below that record is
remembered, not run. So the loop goes on polling, and the other partitions go on. On the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from forebay.logs import logger
from forebay.records import Partition, Record
from forebay.sections.delivery import Delivery
from forebay.stream.duplicates import Asked, Duplicates, stamp_of
from forebay.stream.member import Member

_ANSWER_SECONDS = 3.0
_SAMPLE = 64
"""Records from which their mean size is taken."""

_SLACK = 1.25
_log = logger("worker")


@dataclass(slots=True)
class _Reading:
    """A partition whose past is read again up to the offset `until`; None until its first record has come."""

    until: int | None = None
    position: int = 0
    records: int = 0
    size: int = 0


class Lookback:
    """Keeps the `duplicates` of a consumer's partitions, and fills them from the past when one is assigned.

    It reads at most `most` records and about `most_bytes` of each partition again: the newest ones.
    """

    def __init__(self, consumer: Member, span_ms: int, most: int, most_bytes: int) -> None:
        self._consumer = consumer
        self._span = span_ms
        self._most = most
        self._most_bytes = most_bytes
        self._reading: dict[tuple[str, int], _Reading] = {}
        self.duplicates = Duplicates(span_ms, most)

    def assigned(self, partitions: Iterable[Partition]) -> None:
        """Begin with partitions anew: their past comes first.

        What lies in front of a group that has committed nothing yet was answered by nobody.
        """
        given = list(partitions)
        committed = self._consumer.committed(given, _ANSWER_SECONDS) if given else {}
        for partition in given:
            if committed is None or committed.get(partition) is not None:
                self._reading[partition] = _Reading()
        self.duplicates.assigned(given)

    def forgotten(self, partitions: Iterable[Partition]) -> list[Asked]:
        """Drop all of partitions that belong to somebody else now; return the records that waited for another."""
        gone = list(partitions)
        for partition in gone:
            self._reading.pop(partition, None)
        return self.duplicates.forgotten(gone)

    def sift(self, records: Sequence[Record], now_ms: float, remember: Callable[[Record], None]) -> Sequence[Record]:
        """Return the records that are to be answered; those of the past go to `remember`.

        The first records of a partition are dropped: the consumer goes back, and they come again behind the past.
        """
        if not self._reading:
            return records
        present: list[Record] = []
        first: dict[Partition, list[Record]] = {}
        for record in records:
            place = (record.topic, record.partition)
            reading = self._reading.get(place)
            if reading is None:
                present.append(record)
            elif reading.until is None:
                first.setdefault(Partition(*place), []).append(record)
            elif record.offset < reading.until:
                remember(record)
                reading.position, reading.records = record.offset + 1, reading.records + 1
                reading.size += len(record.value or b"")
            else:
                del self._reading[place]
                _log.debug("looked_back", partition=f"{place[0]}/{place[1]}", records=reading.records)
                present.append(record)
        if first:
            self._look_back(first, now_ms)
        for place, reading in self._reading.items():
            if reading.until is not None and reading.size:
                self._keep_to_bounds(Partition(*place), reading, reading.until)
        return present

    def _look_back(self, found: dict[Partition, list[Record]], now_ms: float) -> None:
        """Send the consumer back by a window from the first records of partitions.

        Where the brokers do not answer it goes back to those records only, and they ask again.
        """
        times = {partition: _time_of(records, now_ms) - self._span for partition, records in found.items()}
        starts = self._consumer.offsets_at(times, _ANSWER_SECONDS)
        for partition, records in found.items():
            here = start = records[0].offset
            if starts is not None:
                found_at = starts.get(partition)
                start = here if found_at is None else max(min(found_at, here), here - self._most)
                if start < here:
                    self._reading[partition] = _Reading(here, start)
                else:
                    del self._reading[partition]
            self._consumer.seek(partition, start)
        # What was read to its end is not: it comes again, and so does the event that says so.
        kept = [event for event in self._consumer.events if not (event.is_end and event.partition in found)]
        self._consumer.events.clear()
        self._consumer.events.extend(kept)

    def _keep_to_bounds(self, partition: Partition, reading: _Reading, until: int) -> None:
        """Leave the older part of the past out where all of it would be too many bytes."""
        left = until - reading.position
        if left <= 0 or (reading.records < _SAMPLE and reading.size < self._most_bytes // 8):
            return
        fitting = max(self._most_bytes - reading.size, 0) * reading.records // reading.size
        if left > fitting * _SLACK:
            reading.position = until - fitting
            self._consumer.seek(partition, reading.position)
            _log.warning(
                "past_not_read_whole",
                partition=f"{partition.topic}/{partition.partition}",
                left_out=left - fitting,
                mend="duplicates of what was left out are answered again: see delivery.deduplicate_rebuild_bytes",
            )


def lookback_of(delivery: Delivery, consumer: Member) -> Lookback | None:
    """Return what keeps the duplicates under these settings; None where nobody asked for that."""
    if not delivery.deduplicate_ms:
        return None
    return Lookback(consumer, delivery.deduplicate_ms, delivery.deduplicate_max_ids, delivery.deduplicate_rebuild_bytes)


def _time_of(records: Sequence[Record], now_ms: float) -> int:
    """Return the time of the first of `records` that has one; a record that could not be read has none."""
    return stamp_of(next((record for record in records if record.timestamp_ms > 0), records[0]), now_ms)
