"""Follow topics without a consumer group: from their end, their beginning or a time, onwards or up to the end.

For the client and the tools. One thread owns a Tail; it commits nothing and joins nothing, so that it never
disturbs a worker's group.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from forebay.errors import ConfigError, KafkaFatalError, KafkaUnavailableError
from forebay.records import Partition, Record
from forebay.settings import Batch, Kafka
from forebay.stream.client_config import consumer_config
from forebay.stream.publish import QUIET
from forebay.stream.reaching import TRY_SECONDS, complaint, metadata
from forebay.stream.troubles import topic_missing


@dataclass(frozen=True, slots=True)
class Last:
    """A start so many records before the end of each partition."""

    records: int


Start = Literal["beginning", "end"] | int | Last
"""Where to start; a number is a Unix time in milliseconds."""

OPEN_SECONDS = 10.0
REFRESH_SECONDS = 30.0
_LEADER_MOVES = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_LEADER_EPOCH,  # a topic that has just been made: the partition's leader has not heard of it
    KafkaError.FENCED_LEADER_EPOCH,
)
_LATEST = -1


@dataclass(frozen=True, slots=True)
class Followed:
    """A topic to follow, or some of its partitions. An `optional` one that is missing or forbidden is left out."""

    topic: str
    partitions: Sequence[int] | None = None
    optional: bool = False


class Tail:
    """Reads committed records of topics, each partition in order."""

    def __init__(self, kafka: Kafka, topics: Iterable[Followed | str], start: Start = "end") -> None:
        self._kafka = kafka
        self._topics = [Followed(topic) if isinstance(topic, str) else topic for topic in topics]
        self._start = start
        self._consumer: Consumer | None = None
        self._unfinished: set[Partition] = set()
        self._ends: dict[Partition, int] = {}
        self._refreshed = 0.0
        self._errors: list[KafkaError] = []
        self._missed: set[str] = set()
        self.partitions: set[Partition] = set()

    def open(self, timeout: float = OPEN_SECONDS) -> None:
        """Connect, find the partitions and go to the start: what is published after this returns will be read.

        Raises KafkaUnavailableError with the address that failed, ConfigError for a topic that does not exist.
        """
        config: dict[str, Any] = consumer_config(self._kafka, Batch()) | {
            "enable.partition.eof": True,
            "group.id": f"{self._kafka.group_id}.tail",
            "auto.offset.reset": "earliest",
            "logger": QUIET,
            "error_cb": self._errors.append,
        }
        self._consumer = Consumer(config)
        deadline = time.monotonic() + timeout
        try:
            found = [TopicPartition(of.topic, n) for of in self._topics for n in self._numbers(of, deadline)]
            ends = self._positioned(found, "end", deadline)
            self._ends = {Partition(at.topic, at.partition): at.offset for at in ends}
            self._assign(self._positioned(found, self._start, deadline))
        except BaseException:
            self.close()
            raise
        self._refreshed = time.monotonic()

    def read(self, limit: int = 1000, wait: float = 0.1) -> list[Record]:
        """Give up to `limit` records; waits at most `wait` seconds for the first one.

        Raises KafkaFatalError where reading can never go on, such as a topic that was deleted or is forbidden.
        """
        if time.monotonic() - self._refreshed > REFRESH_SECONDS:
            self._add_new_partitions()
        first = self._live.poll(wait)
        if first is None:
            return []
        messages = [first, *self._live.consume(limit - 1, 0)] if limit > 1 else [first]
        return [_record(message) for message in messages if self._is_record(message)]

    def read_to_end(self, timeout: float = 60.0) -> Iterator[Record]:
        """Give every record up to the end that each partition had at `open`, and none that came since.

        Raises KafkaUnavailableError if that stalls.
        """
        progress = time.monotonic()
        while self._unfinished:
            records = self.read(wait=0.1)
            if records:
                progress = time.monotonic()
            elif time.monotonic() - progress > timeout:
                raise KafkaUnavailableError(f"reading stalls: {self.last_error or 'no record arrives'}")
            for record in records:
                if record.offset < self._ends.get(Partition(record.topic, record.partition), 0):
                    yield record

    @property
    def at_end(self) -> bool:
        """Whether every partition was read to its end at least once."""
        return not self._unfinished

    @property
    def last_error(self) -> str | None:
        """What the Kafka client complained about last."""
        return complaint(self._errors)

    def take_outage(self) -> str | None:
        """Return why no broker could be reached since this was last asked; None where one could."""
        if not any(error.code() == KafkaError._ALL_BROKERS_DOWN for error in self._errors):
            return None
        why = complaint(self._errors)
        self._errors.clear()
        return why

    def count_partitions(self, topic: str, timeout: float = 10.0) -> int:
        """Give the number of partitions. Raises ConfigError if the topic does not exist."""
        return len(self._numbers(Followed(topic), time.monotonic() + timeout))

    @classmethod
    def require(cls, kafka: Kafka, topic: str) -> int:
        """Connect, give the number of partitions of a topic, disconnect; raises what `open` raises."""
        tail = cls(kafka, [])
        tail.open()
        try:
            return tail.count_partitions(topic)
        finally:
            tail.close()

    def forget(self, topic: str) -> None:
        """Stop following a topic."""
        self._topics = [followed for followed in self._topics if followed.topic != topic]
        gone = {partition for partition in self.partitions if partition.topic == topic}
        self.partitions -= gone
        self._unfinished -= gone
        self._live.incremental_unassign([TopicPartition(*partition) for partition in gone])

    def close(self) -> None:
        """Disconnect."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    @property
    def _live(self) -> Consumer:
        if self._consumer is None:
            raise KafkaFatalError("the tail is not open")
        return self._consumer

    def _numbers(self, followed: Followed, deadline: float) -> list[int]:
        address = self._kafka.bootstrap_servers
        topic = metadata(self._live, address, self._errors, deadline, followed.topic).topics[followed.topic]
        if topic.error is None:
            return sorted(topic.partitions if followed.partitions is None else followed.partitions)
        if followed.optional:
            return []
        if topic.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise ConfigError(topic_missing(followed.topic, address))
        raise ConfigError(f"topic {followed.topic} cannot be read: {topic.error.str()}")

    def _positioned(self, found: list[TopicPartition], start: Start, deadline: float) -> list[TopicPartition]:
        """Replace `beginning`, `end` or a time by offsets; one request per broker, not one per partition."""
        if start == "beginning" or not found:
            return [TopicPartition(at.topic, at.partition, OFFSET_BEGINNING) for at in found]
        if isinstance(start, Last):  # one that is no longer kept is past `auto.offset.reset`: the first that is
            ends = self._positioned(found, "end", deadline)
            return [TopicPartition(at.topic, at.partition, max(at.offset - start.records, 0)) for at in ends]
        when = _LATEST if start == "end" else int(start)
        asked = [TopicPartition(at.topic, at.partition, when) for at in found]
        while True:
            try:
                left = max(1.0, deadline - time.monotonic())
                positions = list(self._live.offsets_for_times(asked, timeout=left))
                why = next((at.error for at in positions if at.error is not None), None)
                if why is None:
                    return positions
            except KafkaException as error:
                why = error.args[0]
            if why.code() not in _LEADER_MOVES or time.monotonic() >= deadline:
                raise KafkaUnavailableError(f"Kafka does not tell offsets: {why.str()}")
            time.sleep(0.05)

    def _assign(self, positions: list[TopicPartition]) -> None:
        new = {Partition(at.topic, at.partition) for at in positions}
        self.partitions |= new
        self._unfinished |= new
        self._live.incremental_assign(positions)

    def _add_new_partitions(self) -> None:
        """Follow partitions that were added meanwhile, from their beginning. Notice a topic that is gone."""
        self._refreshed = time.monotonic()
        for followed in self._topics:
            if followed.partitions is not None:
                continue
            try:
                numbers = self._numbers(followed, time.monotonic() + TRY_SECONDS)
            except KafkaUnavailableError:
                continue
            except ConfigError as error:
                if followed.topic in self._missed:  # a broker that has just started may not know it yet: ask twice
                    raise KafkaFatalError(f"topic {followed.topic} cannot be read any more: {error}") from error
                self._missed.add(followed.topic)
                continue
            self._missed.discard(followed.topic)
            new = [n for n in numbers if Partition(followed.topic, n) not in self.partitions]
            self._assign([TopicPartition(followed.topic, n, OFFSET_BEGINNING) for n in new])

    def _is_record(self, message: Message) -> bool:
        error = message.error()
        if error is None:
            return True
        topic = message.topic() or ""
        if error.code() == KafkaError._PARTITION_EOF:
            self._unfinished.discard(Partition(topic, message.partition() or 0))
        elif error.fatal() or error.code() in (
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.UNKNOWN_TOPIC_OR_PART,
            KafkaError._UNKNOWN_TOPIC,
            KafkaError._UNKNOWN_PARTITION,
        ):
            if not any(followed.topic == topic and followed.optional for followed in self._topics):
                raise KafkaFatalError(f"topic {topic} cannot be read any more: {error.str()}")
        else:
            self._errors.append(error)
        del self._errors[:-50]
        return False


def _record(message: Message) -> Record:
    headers: Any = message.headers()
    return Record(
        topic=message.topic() or "",
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        key=message.key(),
        value=message.value(),
        headers=list(headers or ()),
        timestamp_ms=message.timestamp()[1],
    )
