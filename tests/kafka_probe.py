"""Kafka from a test's side: a plain client to publish, read and look at offsets, and polling with a deadline.

It is confluent-kafka used directly and independently of the worker's own consumer and producer, so that a test never
checks our code with our code.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from forebay.stream import admin


@dataclass(frozen=True, slots=True)
class Read:
    """A record as a test sees it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)

    def header(self, name: str) -> bytes | None:
        """Return the last header of that name."""
        return next((value for key, value in reversed(self.headers) if key == name), None)

    @property
    def source(self) -> str:
        """The record's place as a result names it."""
        return f"{self.topic}/{self.partition}/{self.offset}"


@dataclass(frozen=True, slots=True)
class Send:
    """A record to produce. `partition` -1 leaves the choice to the client, `timestamp_ms` 0 means now."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    partition: int = -1
    timestamp_ms: int = 0


class KafkaProbe:
    """Kafka from a test's side: produce many, read all there is, look at offsets."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers

    @property
    def config(self) -> dict[str, Any]:
        """A librdkafka configuration that reaches this cluster."""
        return {"bootstrap.servers": self.bootstrap_servers, "log_level": 0}

    def produce(self, topic: str, records: Iterable[Send | bytes | None], **client: Any) -> int:
        """Produce every record and return their number once the broker has acknowledged them all.

        A bare `bytes` is a value without a key. `client` are librdkafka keys with underscores for dots.
        """
        failures: list[str] = []
        producer = Producer({"linger.ms": 5, "message.max.bytes": 100_000_000, **self.config, **_dotted(client)})
        count = 0
        for record in records:
            send = record if isinstance(record, Send) else Send(record)
            while True:
                try:
                    producer.produce(
                        topic,
                        send.value,
                        send.key,
                        send.partition,
                        on_delivery=lambda error, _: failures.append(str(error)) if error else None,
                        timestamp=send.timestamp_ms,
                        headers=list(send.headers),
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
            count += 1
            producer.poll(0)
        left = producer.flush(60)
        assert not left, f"{left} of {count} records were not acknowledged within 60 s"
        assert not failures, f"{len(failures)} of {count} records were refused, the first with: {failures[0]}"
        return count

    def read_all(self, topic: str, *, committed_only: bool = False, timeout_s: float = 60.0) -> list[Read]:
        """Return every record from the first to the end offset found now, by partition and offset.

        `committed_only` reads as a `read_committed` consumer does.
        """
        ends = admin.end_offsets(self.config, [topic], committed_only=committed_only)
        starts = admin.begin_offsets(self.config, [topic])
        unread = {place: end for place, end in ends.items() if end > starts[place]}
        consumer = self._consumer(committed_only)
        found: list[Read] = []
        deadline = time.monotonic() + timeout_s
        try:
            consumer.assign([TopicPartition(topic, number, starts[topic, number]) for _, number in unread])
            while unread:
                assert time.monotonic() < deadline, (
                    f"{topic} was not read to its end in {timeout_s} s: {unread} is left"
                )
                found += [_read(message) for message in consumer.consume(500, 0.1) if not message.error()]
                for place in consumer.position([TopicPartition(*key) for key in unread]):
                    # The position passes control records and aborted ones, which are never delivered.
                    if place.offset >= unread[place.topic, place.partition]:
                        del unread[place.topic, place.partition]
        finally:
            consumer.close()
        bounded = [record for record in found if record.offset < ends[record.topic, record.partition]]
        return sorted(bounded, key=lambda record: (record.partition, record.offset))

    def await_records(
        self, topic: str, count: int, *, committed_only: bool = False, timeout_s: float = 60.0
    ) -> list[Read]:
        """Return what the topic holds once that is at least `count` records; fails with their number otherwise."""
        consumer = self._consumer(committed_only)
        found: list[Read] = []
        deadline = time.monotonic() + timeout_s
        try:
            partitions = admin.partition_counts(self.config)[topic]
            consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
            while len(found) < count:
                assert time.monotonic() < deadline, f"{topic} has {len(found)} of {count} records after {timeout_s} s"
                found += [_read(message) for message in consumer.consume(500, 0.05) if not message.error()]
        finally:
            consumer.close()
        return sorted(found, key=lambda record: (record.partition, record.offset))

    def end_offsets(self, *topics: str, committed_only: bool = False) -> dict[tuple[str, int], int]:
        """Return the end offset of every partition of the topics."""
        return admin.end_offsets(self.config, topics, committed_only=committed_only)

    def committed_offsets(self, group: str, *topics: str) -> dict[tuple[str, int], int]:
        """Return the group's committed offsets on the topics; partitions without one are not in it."""
        return admin.committed_offsets(self.config, group, topics)

    def lag(self, group: str, *topics: str) -> int:
        """Return how many offsets the group has yet to commit on the topics."""
        committed = self.committed_offsets(group, *topics)
        return sum(end - committed.get(place, 0) for place, end in self.end_offsets(*topics).items())

    def create_topics(self, topics: Mapping[str, int], **topic_config: Any) -> None:
        """Create topics by name and partitions; `topic_config` keys have underscores for dots."""
        admin.create_topics(self.config, topics, topic_config={k: str(v) for k, v in _dotted(topic_config).items()})

    def delete_topics(self, *names: str) -> None:
        """Delete the topics."""
        admin.delete_topics(self.config, names)

    def _consumer(self, committed_only: bool) -> Consumer:
        isolation = "read_committed" if committed_only else "read_uncommitted"
        return Consumer(
            {
                **self.config,
                "group.id": f"probe-{uuid.uuid4().hex[:8]}",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "isolation.level": isolation,
                "fetch.wait.max.ms": 50,
            }
        )


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = 30.0, every_s: float = 0.05) -> Any:
    """Poll until the condition is true and return its value; fails saying that `what` did not happen."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(every_s)
    return value


def is_gone(process: psutil.Process) -> bool:
    """Whether the process has ended, reaped or not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _read(message: Message) -> Read:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    headers: list[Any] = list(message.headers() or [])
    return Read(
        topic=topic,
        partition=partition,
        offset=offset,
        timestamp_ms=message.timestamp()[1],
        key=message.key(),
        value=message.value(),
        headers=headers,
    )


def _dotted(names: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "."): value for name, value in names.items()}
