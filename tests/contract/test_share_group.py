"""What queue mode may rely on in a share group of a real Kafka, and in the client's preview of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer

from forebay.errors import ConfigError
from forebay.records import Record
from forebay.settings import Settings, load
from forebay.stream import share_group
from forebay.stream.client_config import share_config
from forebay.stream.leases import Leased, Leases
from forebay.stream.share_committer import ShareCommitter
from forebay.stream.share_consumer import ShareConsumer
from tests.conftest import Topics
from tests.contract.sides import Notes
from tests.kafka_probe import KafkaProbe, eventually


def settings_for(kafka: KafkaProbe, topic: str, group: str, **changes: Any) -> Settings:
    values = {"kafka.bootstrap_servers": kafka.bootstrap_servers, "kafka.input_topics": topic, "kafka.group_id": group}
    values |= {"delivery.share_group": True, **{key.replace("__", "."): value for key, value in changes.items()}}
    return load(None, values)


class Member:
    """A share consumer with its ledger and its committer, on a group whose settings were agreed on."""

    def __init__(self, kafka: KafkaProbe, topic: str, group: str, most: int = 30) -> None:
        settings = settings_for(kafka, topic, group)
        sharing, _ = share_group.agree(kafka.config, settings)
        self.leases = Leases(3)
        config = share_config(settings.kafka, settings.batch)
        self.consumer = ShareConsumer(config, [topic], self.leases, sharing, most=most)
        self.committer = ShareCommitter(self.consumer, 0.05)
        self.consumer.start(Notes())
        self.now = 0.0
        self.answers: list[Any] = []

    def take(self, count: int) -> list[Record]:
        """Return `count` records or more, once they have come."""
        found: list[Record] = []

        def enough() -> bool:
            found.extend(self.leases.opened_all(self.consumer.receive(100, 0.05)))
            self.settle()
            return len(found) >= count

        eventually(enough, f"{count} records come", 60, 0.0)
        return found

    def settle(self) -> None:
        self.now += 1.0
        self.answers += self.committer.settle(self.now, idle=True)

    def accept(self, *records: Record) -> None:
        self.leases.closed_all(records)
        self.settle()

    def await_settled(self) -> None:
        def settled() -> bool:
            self.settle()
            return self.committer.is_settled

        eventually(settled, "everything is acknowledged", 30, 0.005)


class Group:
    """A share group on a topic of its own with one partition, and the members that a test lets join."""

    def __init__(self, kafka: KafkaProbe, topic: str, name: str) -> None:
        self.kafka, self.topic, self.name = kafka, topic, name
        self.members: list[Member] = []

    def join(self, most: int = 30) -> Member:
        self.members.append(Member(self.kafka, self.topic, self.name, most))
        return self.members[-1]

    def send(self, count: int, **client: Any) -> None:
        self.kafka.produce(self.topic, [b"%d" % number for number in range(count)], **client)


@pytest.fixture
def group(kafka: KafkaProbe, topics: Topics, group_id: str) -> Iterator[Group]:
    """A share group; its members leave after the test."""
    [topic] = topics("queue")
    made = Group(kafka, topic, group_id)
    yield made
    for member in made.members:
        member.consumer.close()


def offsets(records: list[Record]) -> list[int]:
    return sorted(record.offset for record in records)


def test_a_group_gets_the_settings_that_the_promises_need_once(kafka: KafkaProbe, group_id: str) -> None:
    settings = settings_for(kafka, "t", group_id, delivery__max_attempts=5)
    sharing, changes = share_group.agree(kafka.config, settings)
    assert changes == {
        share_group.START: "earliest",
        share_group.ISOLATION: "read_committed",
        share_group.LOCK: "60000",
        share_group.LIMIT: "7",
    }
    assert (sharing.lock_seconds, sharing.delivery_limit) == (60.0, 7)
    less = settings_for(kafka, "t", group_id, inference__execution_timeout_ms=1000)
    assert share_group.agree(kafka.config, less) == (sharing, {})


@pytest.mark.parametrize(
    "change", [{"inference__execution_timeout_ms": 40_000}, {"delivery__max_attempts": 9}], ids=["lock", "deliveries"]
)
def test_what_the_broker_does_not_allow_stops_the_start_with_both_mends(
    kafka: KafkaProbe, group_id: str, change: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match=r"broker refuses .* lower those, or raise the broker's bounds"):
        share_group.agree(kafka.config, settings_for(kafka, "t", group_id, **change))


def test_members_share_a_partition_and_each_record_has_one_of_them(group: Group) -> None:
    first, second = group.join(), group.join()
    group.send(40, batch_num_messages=5, linger_ms=0)
    mine, others = first.take(5), second.take(5)
    assert not set(offsets(mine)) & set(offsets(others))
    assert {record.deliveries for record in [*mine, *others] if isinstance(record, Leased)} == {1}


def test_records_answered_in_any_order_are_all_accepted(group: Group) -> None:
    """Under way, the client joins later acknowledgements unsorted, and the broker refuses all of them."""
    member = group.join(most=90)
    group.send(30)
    records = member.take(30)
    for index in (7, 8, 4, 29, 1, 2, 0):
        member.accept(records[index])
    member.accept(*(record for index, record in enumerate(records) if index not in (7, 8, 4, 29, 1, 2, 0)))
    member.await_settled()
    assert [answer for answer in member.answers if answer[1]] == []
    assert member.answers


def test_what_a_member_leaves_unanswered_is_delivered_again_and_counted(group: Group) -> None:
    group.send(2)
    for delivery in range(1, 6):
        member = group.join()
        records = member.take(1)
        if delivery == 1:
            assert offsets(records) == [0, 1]
            member.accept(records[0])
        else:
            assert offsets(records) == [1]
        [left] = [record for record in records if record.offset == 1]
        assert isinstance(left, Leased)
        assert (left.deliveries, left.is_last) == (delivery, delivery == 5)
        assert member.leases.returning == ({} if delivery <= 3 else {(left.topic, 0, 1): 2 if delivery == 4 else 4})
        member.consumer.close()


def test_a_consumer_group_of_the_same_name_is_refused_with_a_sentence(group: Group) -> None:
    other = Consumer({**group.kafka.config, "group.id": group.name})
    other.subscribe([group.topic])
    eventually(lambda: other.poll(0.1) is None and other.assignment(), "the other has joined", 60)
    member = group.join()
    with pytest.raises(ConfigError, match=r"choose a kafka.group_id that no consumer group uses"):
        member.take(1)
    other.close()
