"""The two sides of the contract tests: the in-memory double of Kafka, and a real one. Each test runs on both.

A side makes topics of its own, and the parts of a worker that touch Kafka; a test cannot tell which one it has.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from forebay.assembly import build_rooms
from forebay.health import Health
from forebay.metrics import Metrics
from forebay.records import Partition, Record
from forebay.settings import Settings, load
from forebay.stream.client_config import consumer_config, producer_config
from forebay.stream.consumer import Consumer
from forebay.stream.member import Member
from forebay.stream.outbox import Outbox
from forebay.stream.results import Encoder
from forebay.testing import MemoryBroker, MemoryConsumer, MemoryProducer, make_worker
from forebay.worker import Worker
from tests.kafka_probe import KafkaProbe, Read, Send

ROOT = Path(__file__).resolve().parents[2]


class Side(Protocol):
    """Kafka as a contract test sees it: topics `requests` (2 partitions), `results` (2), `dead` (1), one group."""

    requests: str
    results: str
    dead: str

    def send(self, records: Iterable[Send]) -> None: ...
    def read(self, topic: str) -> list[Read]: ...
    def committed(self) -> dict[tuple[str, int], int]: ...
    def consumer(self) -> Member: ...
    def outbox(self, encoder: Encoder) -> Outbox: ...
    def worker(self, settings: Settings) -> Worker: ...
    def settings(self, values: Mapping[str, Any]) -> Settings: ...


class MemorySide:
    """The in-memory double."""

    def __init__(self) -> None:
        self.requests, self.results, self.dead = "requests", "results", "dead"
        self.broker = MemoryBroker({"requests": 2, "results": 2, "dead": 1})
        self.broker.clock_ms = lambda: int(time.time() * 1000)
        self.broker.topics["results"].max_message_bytes = 20_000

    def send(self, records: Iterable[Send]) -> None:
        for record in records:
            headers = list(record.headers)
            self.broker.append(self.requests, record.value, record.key, headers, record.partition)

    def read(self, topic: str) -> list[Read]:
        return [
            Read(r.topic, r.partition, r.offset, r.timestamp_ms, r.key, r.value, r.headers)
            for r in self.broker.records(topic)
        ]

    def committed(self) -> dict[tuple[str, int], int]:
        return {(topic, number): mark for (topic, number), mark in self.broker.committed.items()}

    def consumer(self) -> Member:
        return MemoryConsumer(self.broker, [self.requests])

    def outbox(self, encoder: Encoder) -> Outbox:
        producer = MemoryProducer(self.broker)
        return Outbox({}, encoder, self.dead, make_client=lambda *_, **__: producer)

    def worker(self, settings: Settings) -> Worker:
        return make_worker(self.broker, settings, ROOT)[0]

    def settings(self, values: Mapping[str, Any]) -> Settings:
        return load(None, {**_common(self), **values})


class KafkaSide:
    """A real broker."""

    def __init__(self, kafka: KafkaProbe) -> None:
        unique = uuid.uuid4().hex[:8]
        self.requests, self.results, self.dead = (f"{name}-{unique}" for name in ("requests", "results", "dead"))
        self._kafka = kafka
        self._group = f"group-{unique}"
        kafka.create_topics({self.requests: 2, self.dead: 1})
        kafka.create_topics({self.results: 2}, max_message_bytes=20_000)

    def send(self, records: Iterable[Send]) -> None:
        self._kafka.produce(self.requests, records)

    def read(self, topic: str) -> list[Read]:
        return self._kafka.read_all(topic)

    def committed(self) -> dict[tuple[str, int], int]:
        return self._kafka.committed_offsets(self._group, self.requests)

    def consumer(self) -> Member:
        settings = self.settings({})
        return Consumer(consumer_config(settings.kafka, settings.batch), [self.requests])

    def outbox(self, encoder: Encoder) -> Outbox:
        settings = self.settings({})
        return Outbox(producer_config(settings.kafka, settings.delivery), encoder, self.dead)

    def worker(self, settings: Settings) -> Worker:
        return Worker(settings, build_rooms(settings, [ROOT], {}), Metrics(), Health())

    def settings(self, values: Mapping[str, Any]) -> Settings:
        own = {
            "kafka.bootstrap_servers": self._kafka.bootstrap_servers,
            "kafka.group_id": self._group,
            "kafka.client": {"topic.metadata.propagation.max.ms": 500},  # a missing topic is told soon
        }
        return load(None, {**_common(self), **own, **values})

    def close(self) -> None:
        self._kafka.delete_topics(self.requests, self.results, self.dead)


def _common(side: Side) -> dict[str, Any]:
    return {
        "kafka.input_topics": side.requests,
        "kafka.output_topic": side.results,
        "kafka.dead_letter_topic": side.dead,
        "inference.executor": "inline",
        "inference.device": "cpu",
        "model.factory": "tests.models:Double",
    }


class Notes:
    """A listener that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[Partition]]] = []

    def assigned(self, partitions: list[Partition]) -> None:
        self.told.append(("assigned", sorted(partitions)))

    def revoked(self, partitions: list[Partition]) -> None:
        self.told.append(("revoked", sorted(partitions)))

    def lost(self, partitions: list[Partition]) -> None:
        self.told.append(("lost", sorted(partitions)))


def receive_until(consumer: Member, found: list[Record], done: Callable[[], bool]) -> list[Record]:
    """Receive into `found` until `done`; fails after a while."""
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, f"not within 30 s; received {len(found)} records"
        found += consumer.receive(1000, 0.05)
    return found


def run_to_end(side: Side, values: Mapping[str, Any]) -> Worker:
    """Run a worker in this process until what is in the input now is answered and committed."""
    worker = side.worker(side.settings(values))
    ends: dict[Partition, int] = {}
    for record in side.read(side.requests):
        ends[Partition(record.topic, record.partition)] = record.offset + 1
    worker.run(ends)
    return worker


@pytest.fixture(params=["memory", "kafka"])
def side(request: pytest.FixtureRequest) -> Any:
    """The double, then the real one."""
    if request.param == "memory":
        yield MemorySide()
        return
    made = KafkaSide(request.getfixturevalue("kafka"))
    yield made
    made.close()
