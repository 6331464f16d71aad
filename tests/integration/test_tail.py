"""Following topics without a group, and publishing with receipts, on real Kafka."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

from forebay.errors import ConfigError, KafkaFatalError
from forebay.settings import Kafka
from forebay.stream import tail as tail_module
from forebay.stream.publish import DeliveryError, Publication, Publisher, Receipt
from forebay.stream.tail import Followed, Start, Tail
from tests.conftest import Topics
from tests.kafka_probe import KafkaProbe, Send, eventually


@pytest.fixture
def section(kafka: KafkaProbe) -> Kafka:
    return Kafka(bootstrap_servers=kafka.bootstrap_servers)


def values(section: Kafka, topic: str, start: Start = "beginning") -> list[bytes | None]:
    tail = Tail(section, [topic], start)
    tail.open()
    try:
        return [record.value for record in tail.read_to_end()]
    finally:
        tail.close()


def test_a_topic_is_read_from_its_beginning_to_its_end(section: Kafka, kafka: KafkaProbe, topics: Topics) -> None:
    (topic,) = topics(partitions=3)
    kafka.produce(topic, [Send(b"%d" % number, partition=number % 3) for number in range(30)])
    assert sorted(values(section, topic), key=lambda value: int(value or b"0")) == [b"%d" % n for n in range(30)]
    assert values(section, topic, "end") == []


def test_an_empty_topic_ends_at_once(section: Kafka, topics: Topics) -> None:
    (topic,) = topics(partitions=3)
    assert values(section, topic) == []


def test_a_time_skips_what_is_older(section: Kafka, kafka: KafkaProbe, topics: Topics) -> None:
    (topic,) = topics()
    now = int(time.time() * 1000)
    kafka.produce(topic, [Send(b"old", timestamp_ms=now - 60_000), Send(b"new", timestamp_ms=now)])
    assert values(section, topic, now - 1000) == [b"new"]
    assert values(section, topic, now + 60_000) == []


def test_reading_to_the_end_leaves_out_what_came_after_it_was_opened(
    section: Kafka, kafka: KafkaProbe, topics: Topics
) -> None:
    (topic,) = topics()
    kafka.produce(topic, [b"before"])
    tail = Tail(section, [topic], "beginning")
    tail.open()
    kafka.produce(topic, [b"after"])
    assert [record.value for record in tail.read_to_end()] == [b"before"]
    tail.close()


def test_what_a_transaction_aborted_is_never_seen_and_does_not_hold_up_the_end(
    section: Kafka, kafka: KafkaProbe, topics: Topics
) -> None:
    (topic,) = topics()
    producer = Producer(kafka.config | {"transactional.id": topic})
    producer.init_transactions(60)
    for value, commit in ((b"aborted", False), (b"committed", True), (b"aborted too", False)):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(60)
        producer.commit_transaction(60) if commit else producer.abort_transaction(60)
    assert values(section, topic) == [b"committed"]


def test_partitions_that_are_added_are_followed_from_their_beginning(
    section: Kafka, kafka: KafkaProbe, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "REFRESH_SECONDS", 0.2)
    (topic,) = topics()
    tail = Tail(section, [topic])
    tail.open()
    admin = AdminClient(kafka.config)
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(30)
    eventually(lambda: len(kafka.end_offsets(topic)) == 3, "the topic has three partitions")
    kafka.produce(topic, [Send(b"new", partition=2)], topic_metadata_refresh_interval_ms=100)
    found = eventually(lambda: tail.read(wait=0.2), "the new partition is read", 60)
    assert [(record.partition, record.value) for record in found] == [(2, b"new")]
    tail.close()


def test_a_missing_topic_is_an_error_unless_it_is_optional(section: Kafka, topics: Topics) -> None:
    (topic,) = topics()
    tail = Tail(section, [topic, Followed("nowhere", optional=True)])
    tail.open()
    assert {partition.topic for partition in tail.partitions} == {topic}
    tail.close()
    with pytest.raises(ConfigError, match="topic nowhere does not exist"):
        Tail(section, ["nowhere"]).open()


def test_a_topic_that_is_deleted_ends_the_reading(
    section: Kafka, kafka: KafkaProbe, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "REFRESH_SECONDS", 0.2)
    (topic,) = topics()
    tail = Tail(section, [topic])
    tail.open()
    kafka.delete_topics(topic)
    with pytest.raises(KafkaFatalError, match=f"topic {topic} cannot be read any more"):
        eventually(lambda: tail.read(wait=0.2), "the deletion is noticed", 60)
    tail.close()


def test_every_publication_gets_its_receipt(section: Kafka, kafka: KafkaProbe, topics: Topics) -> None:
    (topic,) = topics(partitions=2)
    receipts: list[Receipt] = []
    publisher = Publisher(section)
    publisher.open()
    headers = [("a", b"\x00\xff"), ("a", None)]
    publisher.publish(Publication(topic, b"\xff", b"k", headers, partition=1, timestamp_ms=1234), receipts.append)
    publisher.publish(Publication(topic, b"x" * 3_000_000), receipts.append)
    assert publisher.flush() == 0
    publisher.close()
    (record,) = kafka.read_all(topic)
    assert (record.value, record.key, record.headers, record.timestamp_ms) == (b"\xff", b"k", headers, 1234)
    assert {str(receipt) for receipt in receipts if receipt.error is None} == {record.source}
    assert ["too large" in (receipt.error or "") for receipt in receipts if receipt.error] == [True]


def test_what_cannot_even_be_queued_is_refused_with_its_reason(section: Kafka, topics: Topics) -> None:
    (topic,) = topics()
    publisher = Publisher(section)
    publisher.open()
    with pytest.raises(DeliveryError, match=r"80,000,000 bytes is too large .*message.max.bytes"):
        publisher.publish(Publication(topic, bytes(80_000_000)), lambda receipt: None)
    publisher.close()
    with pytest.raises(DeliveryError, match="not open"):
        publisher.poll()


def test_a_callback_that_raises_loses_no_other_receipt(section: Kafka, topics: Topics) -> None:
    (topic,) = topics()
    receipts: list[Receipt] = []

    def fail(receipt: Receipt) -> None:
        raise RuntimeError("a mistake of the caller")

    publisher = Publisher(section)
    publisher.open()
    for number in range(10):
        publisher.publish(Publication(topic, b"x"), fail if number % 2 else receipts.append)
    assert publisher.flush() == 0
    assert len(receipts) == 5
    publisher.close()
