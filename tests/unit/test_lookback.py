"""Looking back: the ids of a newly assigned partition's past are read again before anything of it is answered."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from forebay.records import Partition, Record
from forebay.stream.lookback import Lookback
from forebay.stream.member import Event
from forebay.testing import MemoryBroker, MemoryConsumer

PLACE, OTHER = Partition("requests", 0), Partition("requests", 1)
NOW_MS = 1_800_000_000_000.0
START = 1_700_000_000_000


class Reader:
    """Reads a topic through a lookback; `events` come beside the next records, as a client's do."""

    def __init__(self, span_ms: int = 1_000, most: int = 1_000, most_bytes: int = 1 << 20) -> None:
        self.broker = MemoryBroker({"requests": 2})
        self.now = START
        self.broker.clock_ms = lambda: self.now
        self.consumer = MemoryConsumer(self.broker, ["requests"])
        self.lookback = Lookback(self.consumer, span_ms, most, most_bytes)
        self.past: list[int] = []
        self.present: list[int] = []
        self.consumer.start(self)

    def assigned(self, partitions: list[Partition]) -> None:
        self.lookback.assigned(partitions)

    def revoked(self, partitions: list[Partition]) -> None:
        self.lookback.forgotten(partitions)

    lost = revoked

    def write(self, count: int, step_ms: int = 1, size: int = 1, partition: int = 0) -> None:
        for _ in range(count):
            self.broker.append("requests", bytes(size), b"k", None, partition)
            self.now += step_ms

    def turn(self, limit: int = 20) -> None:
        records = self.consumer.receive(limit, 0.0)

        def remember(record: Record) -> None:
            self.past.append(record.offset)
            self.lookback.duplicates.remember(record, str(record.offset), NOW_MS)

        self.present += [record.offset for record in self.lookback.sift(records, NOW_MS, remember)]

    def turns(self, number: int = 60, limit: int = 20) -> None:
        for _ in range(number):
            self.turn(limit)


def test_the_past_of_one_window_is_remembered_and_everything_behind_it_is_answered() -> None:
    reader = Reader(span_ms=30)
    reader.write(100)
    reader.broker.committed[PLACE] = 80
    reader.turns()
    assert reader.past == list(range(50, 80))
    assert reader.present == list(range(80, 100))
    assert len(reader.lookback.duplicates) == 30


def test_a_partition_without_a_commit_has_no_past() -> None:
    reader = Reader()
    reader.write(10)
    reader.turns()
    assert (reader.past, reader.present) == ([], list(range(10)))


def test_the_other_partitions_go_on_meanwhile() -> None:
    reader = Reader()
    reader.write(100)
    reader.write(5, partition=1)
    reader.broker.committed[PLACE] = 90
    reader.turn(limit=200)
    assert reader.present == list(range(5)), "those of the other partition, which has no past"
    reader.turns()
    assert reader.present == [*range(5), *range(90, 100)]


def test_an_idle_partition_looks_back_at_its_next_record() -> None:
    reader = Reader(span_ms=50)
    reader.write(40)
    reader.broker.committed[PLACE] = 40
    reader.turns(3)
    reader.now += 30
    reader.write(1)
    reader.turns()
    assert (reader.past, reader.present) == (list(range(20, 40)), [40])


def test_no_more_records_are_read_than_ids_are_remembered() -> None:
    reader = Reader(span_ms=1_000_000, most=25)
    reader.write(200)
    reader.broker.committed[PLACE] = 190
    reader.turns()
    assert (reader.past, reader.present) == (list(range(165, 190)), list(range(190, 200)))


def test_of_large_records_only_the_newest_part_of_the_past_is_read() -> None:
    reader = Reader(span_ms=1_000_000, most_bytes=100_000)
    reader.write(1_000, size=1_000)
    reader.broker.committed[PLACE] = 1_000
    reader.write(1)
    reader.turns()
    assert reader.present == [1_000]
    assert reader.past[-1] == 999
    assert len(reader.past) <= 120, "the sample, and what fits behind it"
    assert reader.past[-20:] == list(range(980, 1_000))


class Silent(MemoryConsumer):
    """A consumer whose brokers do not answer for a while."""

    silent = 0

    def offsets_at(self, times: Mapping[Partition, int], timeout: float) -> dict[Partition, int | None] | None:
        self.silent -= 1
        return None if self.silent >= 0 else super().offsets_at(times, timeout)


def test_where_no_broker_answers_nothing_is_answered_and_it_asks_again() -> None:
    reader = Reader(span_ms=30)
    reader.write(100)
    reader.broker.committed[PLACE] = 80
    reader.consumer.__class__ = Silent
    reader.consumer.silent = 3  # type: ignore[attr-defined]
    reader.turns(3)
    assert (reader.past, reader.present) == ([], [])
    reader.turns()
    assert (reader.past, reader.present) == (list(range(50, 80)), list(range(80, 100)))


@pytest.mark.parametrize("committed", [0, 80])
def test_an_end_that_came_with_the_first_records_is_not_believed(committed: int) -> None:
    """They are read again: a watermark behind them would pass over what nobody has answered."""
    reader = Reader(span_ms=30)
    reader.write(100)
    reader.broker.committed[PLACE] = committed
    theirs = Event("_PARTITION_EOF", "", OTHER, 0)
    reader.turns(0)
    reader.consumer.events += [Event("_PARTITION_EOF", "", PLACE, 100), theirs, Event("_TRANSPORT", "")]
    reader.turn(limit=200)
    assert [event.name for event in reader.consumer.events] == ["_PARTITION_EOF", "_TRANSPORT"]
    assert reader.consumer.events[0] is theirs


def test_a_partition_that_goes_and_comes_back_begins_anew() -> None:
    reader = Reader(span_ms=50)
    reader.write(100)
    reader.broker.committed[PLACE] = 80
    reader.turns(2)
    assert reader.past
    reader.consumer.revoke([PLACE])
    reader.turn()
    assert len(reader.lookback.duplicates) == 0
    reader.past.clear()
    reader.consumer.assign([PLACE])
    reader.turns()
    assert (reader.past, reader.present) == (list(range(30, 80)), list(range(80, 100)))


def test_records_that_are_gone_from_the_log_do_not_hold_the_partition_up() -> None:
    """Retention may take the first record away between the two times that it is read."""
    reader = Reader(span_ms=50)
    reader.write(100)
    reader.broker.committed[PLACE] = 80
    reader.turn()
    log = reader.broker.topics["requests"].partitions[0]
    kept = [record for record in log if record.offset not in range(75, 85)]
    log[:] = kept
    reader.turns()
    assert reader.present == list(range(85, 100))
