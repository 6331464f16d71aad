"""An in-memory stand-in for a Kafka cluster, for tests: topics, committed offsets, one group, and faults on demand.

`MemoryConsumer` has the methods of `consumer.Consumer`, `MemoryProducer` those of confluent-kafka's producer that the
outbox uses, so that the outbox under test is the real one. Contract tests hold both against a real broker. Everything
happens on the calling thread, in `receive` and `poll`.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import confluent_kafka as ck

from forebay.errors import KafkaFatalError
from forebay.records import Headers, Partition, Record
from forebay.stream.member import Event, Listener


@dataclass(slots=True)
class MemoryTopic:
    """A topic: a list of records per partition. `fail` holds error codes for the next produces, in order."""

    partitions: list[list[Record]]
    fail: deque[int] = field(default_factory=deque)
    max_message_bytes: int = 1_048_588


class MemoryBroker:
    """Topics and the committed offsets of one group."""

    def __init__(self, topics: dict[str, int]) -> None:
        self.topics = {name: MemoryTopic([[] for _ in range(count)]) for name, count in topics.items()}
        self.committed: dict[Partition, int] = {}
        self.notes: dict[Partition, str] = {}
        self.commit_history: list[dict[Partition, int]] = []
        self.fail_commits: deque[int] = deque()
        self.clock_ms: Callable[[], int] = lambda: 0

    def append(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int = -1,
    ) -> Record:
        """Append a record; without a partition the key decides, without a key the partitions take turns."""
        logs = self.topics[topic].partitions
        if partition < 0:
            partition = (zlib.crc32(key) if key else sum(map(len, logs))) % len(logs)
        log = logs[partition]
        record = Record(topic, partition, len(log), key, value, headers or [], self.clock_ms())
        log.append(record)
        return record

    def records(self, topic: str) -> list[Record]:
        """Return every record of a topic, partition by partition."""
        return list(chain.from_iterable(self.topics[topic].partitions))

    def fail_next(self, topic: str, code: int, times: int = 1) -> None:
        """Let the next `times` produces to a topic fail with an error code."""
        self.topics[topic].fail.extend([code] * times)


class MemoryConsumer:
    """Reads the input topics of a MemoryBroker. All partitions are assigned at the first `receive`."""

    def __init__(self, broker: MemoryBroker, topics: Iterable[str]) -> None:
        self._broker = broker
        self._topics = list(topics)
        self._listener: Listener | None = None
        self._positions: dict[Partition, int] = {}
        self._changes: deque[tuple[str, list[Partition]]] = deque()
        self._answers: deque[tuple[dict[Partition, int], dict[Partition, str]]] = deque()
        self.events: deque[Event] = deque()
        self.commits: deque[tuple[dict[Partition, int], dict[Partition, str]]] = deque()
        self.commits_in_flight = 0
        self.paused = False
        self.closed = False
        self.reachable = True
        self.fatal: str | None = None

    def start(self, listener: Listener) -> None:
        """Join: every partition will be assigned."""
        self._listener = listener
        self.assign(
            Partition(topic, number)
            for topic in self._topics
            for number in range(len(self._broker.topics[topic].partitions))
        )

    def assign(self, partitions: Iterable[Partition]) -> None:
        """Let the next `receive` assign partitions, from the committed offsets."""
        self._changes.append(("assigned", list(partitions)))

    def revoke(self, partitions: Iterable[Partition]) -> None:
        """Let the next `receive` revoke partitions."""
        self._changes.append(("revoked", list(partitions)))

    def lose(self, partitions: Iterable[Partition]) -> None:
        """Let the next `receive` lose partitions."""
        self._changes.append(("lost", list(partitions)))

    def receive(self, limit: int, wait: float) -> list[Record]:
        """Return at most `limit` records of the assigned partitions; never waits."""
        if self.fatal is not None:
            raise KafkaFatalError(self.fatal)
        while self._answers:
            self.commits_in_flight -= 1
            self.commits.append(self._answers.popleft())
        while self._changes:
            self._change(*self._changes.popleft())
        found: list[Record] = []
        if not self.paused:
            for partition, position in self._positions.items():
                log = self._broker.topics[partition.topic].partitions[partition.partition]
                fetched = log[position : position + limit - len(found)]
                self._positions[partition] = position + len(fetched)
                found += [_copied(record) for record in fetched]
        return found

    def _change(self, kind: str, partitions: list[Partition]) -> None:
        assert self._listener is not None
        if kind == "assigned":
            for partition in partitions:
                self._positions[partition] = self._broker.committed.get(partition, 0)
        getattr(self._listener, kind)(partitions)
        if kind != "assigned":
            for partition in partitions:
                self._positions.pop(partition, None)

    def pause(self) -> None:
        """Return no more records."""
        self.paused = True

    def resume(self) -> None:
        """Return records again."""
        self.paused = False

    def commit(self, marks: dict[Partition, int], notes: Mapping[Partition, str] | None = None) -> None:
        """Commit; the answer comes with the next `receive`."""
        self.commits_in_flight += 1
        if self._broker.fail_commits:
            name = ck.KafkaError(self._broker.fail_commits.popleft()).name()
            self._answers.append((marks, dict.fromkeys(marks, name)))
            return
        self._broker.committed |= marks
        self._broker.notes |= {partition: (notes or {}).get(partition, "") for partition in marks}
        self._broker.commit_history.append(dict(marks))
        self._answers.append((marks, {}))

    def seek(self, partition: Partition, offset: int) -> None:
        """Move the position of an assigned partition."""
        self._positions[partition] = offset

    def committed(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int | None] | None:
        """Return the committed offsets."""
        return {partition: self._broker.committed.get(partition) for partition in partitions}

    def offsets_at(self, times: Mapping[Partition, int], timeout: float) -> dict[Partition, int | None] | None:
        """Return the first offset at or after each time in ms, None where there is none."""
        found: dict[Partition, int | None] = {}
        for place, time in times.items():
            log = self._broker.topics[place.topic].partitions[place.partition]
            found[place] = next((record.offset for record in log if record.timestamp_ms >= time), None)
        return found

    def notes(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, tuple[int, str]]:
        """Return the committed offsets that have metadata, with it."""
        committed, notes = self._broker.committed, self._broker.notes
        return {place: (committed[place], notes[place]) for place in partitions if notes.get(place)}

    def rewind(self, partitions: Iterable[Partition]) -> bool:
        """Move the positions back to the committed offsets."""
        for partition in partitions:
            self._positions[partition] = self._broker.committed.get(partition, 0)
        return True

    def reaches(self, topics: Iterable[str], timeout: float) -> bool:
        """Return `reachable`."""
        return self.reachable

    def end_offset(self, partition: Partition) -> int | None:
        """Return the end of a partition."""
        return len(self._broker.topics[partition.topic].partitions[partition.partition])

    def close(self) -> None:
        """Leave the group: what is assigned is revoked."""
        if self._listener is not None and self._positions and not self.closed:
            self._change("revoked", list(self._positions))
        self.closed = True


class MemoryProducer:
    """The part of confluent-kafka's producer that the outbox uses; records are there at once, reports with `poll`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._reports: deque[tuple[Callable[[Any, Any], None], Any]] = deque()
        self.hold_reports = False

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        partition: int = -1,
        on_delivery: Callable[[Any, Any], None] | None = None,
        headers: Headers | None = None,
    ) -> None:
        """Append a record, or fail as the topic was told to."""
        error: Any = None
        found = self._broker.topics.get(topic)
        if found is None:
            error = ck.KafkaError(ck.KafkaError.UNKNOWN_TOPIC_OR_PART)
        elif found.fail:
            error = ck.KafkaError(found.fail.popleft())
        elif len(value or b"") > found.max_message_bytes:
            error = ck.KafkaError(ck.KafkaError.MSG_SIZE_TOO_LARGE)
        elif partition >= len(found.partitions):
            error = ck.KafkaError(ck.KafkaError._UNKNOWN_PARTITION)
        else:
            self._broker.append(topic, value, key, headers, partition)
        if on_delivery is not None:
            self._reports.append((on_delivery, error))

    def poll(self, timeout: float = 0) -> int:
        """Serve the delivery reports."""
        served = 0
        while self._reports and not self.hold_reports:
            report, error = self._reports.popleft()
            report(error, None)
            served += 1
        return served

    def __len__(self) -> int:
        """Return how many records have no served report."""
        return len(self._reports)

    def purge(self) -> None:
        """Forget the reports that were not served."""
        self._reports.clear()


def _copied(record: Record) -> Record:
    return Record(
        record.topic, record.partition, record.offset, record.key, record.value, record.headers, record.timestamp_ms
    )
