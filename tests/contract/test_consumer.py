"""What the corridor may rely on in a consumer, on the in-memory double and on real Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from forebay.records import Partition, Record
from forebay.stream.member import Member
from tests.contract.sides import KafkaSide, Notes, Side, receive_until
from tests.kafka_probe import KafkaProbe, Send


@contextmanager
def joined(side: Side) -> Iterator[tuple[Member, Notes]]:
    """Yield a consumer that joins with its first `receive`, and what its listener is told."""
    consumer, notes = side.consumer(), Notes()
    consumer.start(notes)
    try:
        yield consumer, notes
    finally:
        consumer.close()


def numbered(partition: int, count: int) -> list[Send]:
    return [Send(b"%d" % n, None, partition=partition) for n in range(count)]


def read(consumer: Member, count: int) -> list[Record]:
    found: list[Record] = []
    return receive_until(consumer, found, lambda: len(found) >= count)


def test_a_record_arrives_as_it_was_sent(side: Side) -> None:
    headers = [("a", b"1"), ("none", None), ("a", b"\xff\x00")]
    side.send([Send(b"\x00v", b"\xffk", headers, 1), Send(None, None, (), 0), Send(b"", b"", [], 0)])
    consumer, notes = side.consumer(), Notes()
    consumer.start(notes)
    found = sorted(read(consumer, 3), key=lambda record: (record.partition, record.offset))
    consumer.close()

    assert [(r.topic, r.partition, r.offset, r.key, r.value, r.headers) for r in found] == [
        (side.requests, 0, 0, None, None, []),
        (side.requests, 0, 1, b"", b"", []),
        (side.requests, 1, 0, b"\xffk", b"\x00v", headers),
    ]
    assert {(r.source, r.timestamp_ms) for r in found} == {
        (sent.source, sent.timestamp_ms) for sent in side.read(side.requests)
    }
    assert notes.told[0] == ("assigned", [Partition(side.requests, 0), Partition(side.requests, 1)])


def test_a_partition_is_read_in_order_and_no_call_returns_more_than_asked(side: Side) -> None:
    side.send(numbered(0, 300) + numbered(1, 300))
    consumer = side.consumer()
    consumer.start(Notes())
    found: list[Record] = []
    while len(found) < 600:
        got = consumer.receive(7, 0.05)
        assert len(got) <= 7
        found += got
    consumer.close()
    for partition in (0, 1):
        assert [record.offset for record in found if record.partition == partition] == list(range(300))


def test_reading_moves_no_offset_and_a_commit_is_answered_and_remembered(side: Side) -> None:
    side.send(numbered(0, 10) + numbered(1, 10))
    with joined(side) as (consumer, _):
        read(consumer, 20)
        assert side.committed() == {}
        marks = {Partition(side.requests, 0): 4, Partition(side.requests, 1): 10}
        consumer.commit(marks)
        assert consumer.commits_in_flight == 1
        receive_until(consumer, [], lambda: bool(consumer.commits))
        assert list(consumer.commits) == [(marks, {})]
        assert consumer.commits_in_flight == 0
        assert consumer.committed(marks, 10) == marks
    assert side.committed() == marks

    with joined(side) as (successor, _):
        assert [(r.partition, r.offset) for r in read(successor, 6)] == [(0, offset) for offset in range(4, 10)]


def test_a_note_comes_back_with_its_offset_and_goes_with_the_next_commit(side: Side) -> None:
    first, second = Partition(side.requests, 0), Partition(side.requests, 1)
    side.send(numbered(0, 5) + numbered(1, 5))
    with joined(side) as (consumer, _):
        read(consumer, 10)
        assert consumer.notes([first, second], 10) == {}
        consumer.commit({first: 2, second: 3}, {first: "what is finished"})
        receive_until(consumer, [], lambda: bool(consumer.commits))
        assert consumer.notes([first, second], 10) == {first: (2, "what is finished")}
        consumer.commits.clear()
        consumer.commit({first: 4})
        receive_until(consumer, [], lambda: bool(consumer.commits))
        assert consumer.notes([first, second], 10) == {}


def test_the_leaders_of_topics_are_well_where_all_answer(side: Side) -> None:
    side.send(numbered(0, 1))
    with joined(side) as (consumer, _):
        read(consumer, 1)
        assert consumer.reaches([side.requests], 20)


def test_a_commit_backwards_is_taken_and_one_without_offsets_asks_for_none(side: Side) -> None:
    place = Partition(side.requests, 0)
    side.send(numbered(0, 5))
    with joined(side) as (consumer, _):
        read(consumer, 5)
        assert consumer.committed([place], 10) == {place: None}
        for mark in (5, 2):
            consumer.commit({place: mark})
            receive_until(consumer, [], lambda: bool(consumer.commits))
            consumer.commits.clear()
    assert side.committed() == {place: 2}


def test_a_paused_consumer_returns_nothing_and_goes_on_where_it_was(side: Side) -> None:
    side.send(numbered(0, 50))
    with joined(side) as (consumer, _):
        found: list[Record] = []
        while len(found) < 10:
            found += consumer.receive(10 - len(found), 0.05)
        consumer.pause()
        side.send(numbered(0, 50))
        assert [consumer.receive(100, 0.01) for _ in range(30)] == [[]] * 30
        assert consumer.paused
        consumer.resume()
        receive_until(consumer, found, lambda: len(found) >= 100)
        assert [record.offset for record in found] == list(range(100))


def test_rewinding_reads_again_from_what_is_committed(side: Side) -> None:
    place, other = Partition(side.requests, 0), Partition(side.requests, 1)
    side.send(numbered(0, 10) + numbered(1, 3))
    with joined(side) as (consumer, _):
        read(consumer, 13)
        consumer.commit({place: 7})
        receive_until(consumer, [], lambda: bool(consumer.commits))
        consumer.rewind([place, other])
        again = read(consumer, 6)
        assert sorted((record.partition, record.offset) for record in again) == [
            *[(0, offset) for offset in (7, 8, 9)],
            *[(1, offset) for offset in (0, 1, 2)],
        ]


def test_the_end_of_a_partition_is_known_once_it_was_read(side: Side) -> None:
    side.send(numbered(0, 12))
    with joined(side) as (consumer, _):
        read(consumer, 12)
        assert consumer.end_offset(Partition(side.requests, 0)) == 12


def test_leaving_tells_that_the_partitions_are_revoked_once(side: Side) -> None:
    with joined(side) as (consumer, notes):
        receive_until(consumer, [], lambda: bool(notes.told))
    both = [Partition(side.requests, 0), Partition(side.requests, 1)]
    assert notes.told == [("assigned", both), ("revoked", both)]


def test_a_partition_that_was_paused_when_it_left_is_read_when_it_comes_back(kafka: KafkaProbe) -> None:
    """The client remembers a pause through losing and winning a partition: the worker was idle for ever."""
    side = KafkaSide(kafka)
    with joined(side) as (consumer, notes):
        receive_until(consumer, [], lambda: bool(notes.told))
        consumer.pause()
        with joined(side) as (other, others_notes):
            receive_both = partial(_receive_both, consumer, other)
            receive_both(lambda: ("revoked", 1) in _sizes(notes) and ("assigned", 1) in _sizes(others_notes))
            consumer.resume()
        receive_until(consumer, [], lambda: _sizes(notes).count(("assigned", 1)) == 1)
        side.send(numbered(0, 5) + numbered(1, 5))
        assert len(read(consumer, 10)) == 10
    side.close()


def _receive_both(one: Member, other: Member, done: Callable[[], bool]) -> None:
    receive_until(one, [], lambda: bool(other.receive(1, 0.02)) or done())


def _sizes(notes: Notes) -> list[tuple[str, int]]:
    return [(kind, len(partitions)) for kind, partitions in notes.told]
