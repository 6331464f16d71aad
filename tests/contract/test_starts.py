"""Where a consumer starts on a real Kafka, and what becomes of offsets that its log has not any more."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer as PlainConsumer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient  # type: ignore[attr-defined]

from forebay.cli.check_kafka import check_kafka
from forebay.cli.findings import State
from forebay.errors import NoStartError
from forebay.records import Partition, Record
from forebay.settings import Settings, load
from forebay.stream.client_config import consumer_config
from forebay.stream.consumer import Consumer
from forebay.stream.starts import StartRule
from tests.contract.sides import Notes, receive_until
from tests.kafka_probe import KafkaProbe, Send

both = pytest.mark.parametrize("protocol", ["classic", "consumer"])
SKIP = StartRule(out_of_range="skip")


class Log:
    """A topic of two partitions with twenty records each, and a group."""

    def __init__(self, kafka: KafkaProbe) -> None:
        self.kafka = kafka
        unique = uuid.uuid4().hex[:8]
        self.topic, self.group = f"requests-{unique}", f"group-{unique}"
        self.first, self.second = Partition(self.topic, 0), Partition(self.topic, 1)
        kafka.create_topics({self.topic: 2})
        self.send(20)

    def send(self, count: int) -> None:
        self.kafka.produce(self.topic, [Send(b"%d" % n, None, partition=p) for n in range(count) for p in (0, 1)])

    def commit(self, marks: Mapping[Partition, int]) -> None:
        client = PlainConsumer({**self.kafka.config, "group.id": self.group})
        offsets = [TopicPartition(*partition, mark) for partition, mark in marks.items()]
        for place in client.commit(offsets=offsets, asynchronous=False) or ():
            assert place.error is None
        client.close()

    def delete(self, partition: Partition, until: int) -> None:
        admin = AdminClient(self.kafka.config)  # held: a client that is let go answers no future
        [future] = admin.delete_records([TopicPartition(*partition, until)]).values()
        future.result(30)

    def settings(self, **kafka: str) -> Settings:
        own = {"bootstrap_servers": self.kafka.bootstrap_servers, "group_id": self.group, "input_topics": self.topic}
        values = {f"kafka.{key}": value for key, value in {**own, **kafka}.items()}
        return load(None, {**values, "model.factory": "tests.models:Double"})

    @contextmanager
    def joined(self, rule: StartRule, protocol: str = "classic") -> Iterator[tuple[Consumer, Notes]]:
        settings = self.settings(group_protocol=protocol)
        consumer, notes = Consumer(consumer_config(settings.kafka, settings.batch), [self.topic], rule), Notes()
        consumer.start(notes)
        try:
            yield consumer, notes
        finally:
            consumer.close()


@pytest.fixture
def log(kafka: KafkaProbe) -> Iterator[Log]:
    made = Log(kafka)
    yield made
    kafka.delete_topics(made.topic)


def read(consumer: Consumer, count: int) -> dict[int, list[int]]:
    """Read `count` records; return the offsets by partition."""
    found: list[Record] = []
    receive_until(consumer, found, lambda: len(found) >= count)
    return {number: [r.offset for r in found if r.partition == number] for number in (0, 1)}


def skipped(consumer: Consumer) -> list[tuple[Partition | None, int]]:
    return [(event.partition, event.skipped) for event in consumer.events if event.skipped]


@both
def test_deleted_requests_stop_the_consumer_and_the_other_partitions_go_on(log: Log, protocol: str) -> None:
    log.commit({log.first: 3, log.second: 15})
    log.delete(log.first, 10)
    found: list[Record] = []
    with log.joined(StartRule(), protocol) as (consumer, _):
        with pytest.raises(NoStartError, match="stands at offset 3, the first that is still there is 10: up to 7 requ"):
            receive_until(consumer, found, lambda: False)
        receive_until(consumer, found, lambda: len(found) >= 5)
        found += [record for _ in range(20) for record in consumer.receive(100, 0.01)]
    assert [(r.partition, r.offset) for r in found] == [(1, offset) for offset in range(15, 20)]


@both
def test_skipping_goes_on_at_the_first_record_and_counts_what_was_deleted(log: Log, protocol: str) -> None:
    log.commit({log.first: 3, log.second: 15})
    log.delete(log.first, 10)
    with log.joined(SKIP, protocol) as (consumer, notes):
        assert read(consumer, 15) == {0: [*range(10, 20)], 1: [*range(15, 20)]}
        assert skipped(consumer) == [(log.first, 7)]
        assert notes.told == [("assigned", [log.first, log.second])]
        consumer.commit({log.first: 20, log.second: 20})
        receive_until(consumer, [], lambda: bool(consumer.commits))
        assert consumer.commits[0][1] == {}
        with log.joined(SKIP, protocol) as (other, others):  # it still gives a partition back, and gets it again
            receive_until(consumer, [], lambda: not other.receive(1, 0.02) and told(others))
        receive_until(consumer, [], lambda: len(notes.told) >= 3)
        log.send(5)
        assert read(consumer, 10) == {0: [*range(20, 25)], 1: [*range(20, 25)]}
    assert [kind for kind, _ in notes.told[:3]] == ["assigned", "revoked", "assigned"]


def told(notes: Notes) -> bool:
    return any(kind == "assigned" and partitions for kind, partitions in notes.told)


def test_deleting_that_overtakes_a_reader_is_counted_from_where_it_reads(log: Log) -> None:
    """A paused consumer has nothing prefetched: it comes back to offsets that are gone."""
    log.commit({log.second: 20})
    with log.joined(SKIP) as (consumer, _):
        found: list[Record] = []
        while not found:
            found += consumer.receive(5, 0.05)
        position = found[-1].offset + 1
        consumer.pause()
        log.delete(log.first, 19)
        consumer.resume()
        receive_until(consumer, found, lambda: found[-1].offset == 19)
        assert [record.offset for record in found] == [*range(position), 19]
        assert skipped(consumer) == [(log.first, 19 - position)]


def test_an_offset_behind_the_end_of_its_log_counts_as_none(log: Log) -> None:
    log.commit({log.first: 700, log.second: 20})
    with log.joined(StartRule()) as (consumer, _):
        assert read(consumer, 20) == {0: [*range(20)], 1: []}
        assert "FOREBAY_BEHIND_THE_END" in [event.name for event in consumer.events]


@both
def test_a_new_group_starts_where_the_rule_says(log: Log, protocol: str) -> None:
    log.delete(log.first, 10)
    with log.joined(StartRule(), protocol) as (consumer, _):
        assert read(consumer, 30) == {0: [*range(10, 20)], 1: [*range(20)]}
        assert not [event for event in consumer.events if not event.is_end]
    with log.joined(StartRule("latest"), protocol) as (consumer, notes):
        receive_until(consumer, [], lambda: told(notes))
        log.send(2)
        assert read(consumer, 4) == {0: [20, 21], 1: [20, 21]}
        consumer.rewind([log.first, log.second])  # nothing is committed: what was read must not be jumped over
        assert read(consumer, 4) == {0: [20, 21], 1: [20, 21]}


def test_a_seek_moves_a_partition_that_the_client_has_stopped(log: Log) -> None:
    log.commit({log.first: 3, log.second: 20})
    log.delete(log.first, 10)
    with log.joined(StartRule()) as (consumer, _):
        with pytest.raises(NoStartError):
            receive_until(consumer, [], lambda: False)
        consumer.seek(log.first, 12)
        assert read(consumer, 8) == {0: [*range(12, 20)], 1: []}


@pytest.mark.parametrize(("setting", "state"), [("stop", State.FAILED), ("skip", State.WARNING)])
def test_the_check_before_a_start_says_what_was_deleted_and_where_the_end_is_passed(
    log: Log, setting: str, state: State
) -> None:
    log.commit({log.first: 3, log.second: 700})
    log.delete(log.first, 10)
    found = [
        finding for finding in check_kafka(log.settings(offset_out_of_range=setting)) if finding.question == "offsets"
    ]
    assert [finding.state for finding in found] == [state, State.WARNING]
    assert f"up to 7 requests deleted before an answer, in {log.topic} [0]" in found[0].told
    assert f"behind the end of {log.topic} [1]" in found[1].told
    if setting == "stop":
        assert f"--topic {log.topic}:0 --reset-offsets --to-earliest" in (found[0].fix or "")
