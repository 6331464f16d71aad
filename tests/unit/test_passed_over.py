"""Records that get no outcome of their own, in a line whose results keep an order."""

from __future__ import annotations

from forebay.custody import Custody
from forebay.records import Outcome, Partition, Record
from forebay.sections.delivery import Delivery
from forebay.stream.memory import MemoryBroker, MemoryConsumer
from forebay.stream.offsets import Offsets

PLACE = Partition("requests", 0)


def outcome(record: Record) -> Outcome:
    return Outcome(record, str(record.offset), "results", None, b"", [], "model", 0.0, [])


def held(count: int) -> tuple[Custody, list[Record]]:
    """A custody that keeps the order of its partition, and records that it took."""
    consumer = MemoryConsumer(MemoryBroker({"requests": 1}), ["requests"])
    custody = Custody(Delivery(ordering="partition", deduplicate_ms=1_000), consumer, Offsets())
    custody.assigned([PLACE])
    records = [Record("requests", 0, offset, None, b"x", [], 1) for offset in range(count)]
    return custody, custody.take(records)


def test_what_waited_behind_a_record_that_is_passed_over_leaves_before_all_that_is_behind_it() -> None:
    """Seen before: the next outcome overtook it, and in exactly-once mode took the committed offset back."""
    custody, records = held(4)
    assert custody.release(outcome(records[2])) == []
    custody.pass_over(records[:2])
    leaving = custody.release(outcome(records[3]))
    assert [one.record.offset for one in leaving] == [2, 3]
    assert custody.take_freed() == []


def test_it_leaves_by_itself_where_nothing_comes_after_it() -> None:
    custody, records = held(2)
    assert custody.release(outcome(records[1])) == []
    custody.pass_over(records[:1])
    assert [one.record.offset for one in custody.take_freed()] == [1]
    assert (custody.requests, custody.bytes) == (1, 1)


def test_it_stays_here_where_its_partition_has_gone_meanwhile() -> None:
    custody, records = held(2)
    custody.release(outcome(records[1]))
    custody.pass_over(records[:1])
    custody.offsets.forgotten([PLACE])
    assert custody.take_freed() == []
    assert (custody.requests, custody.bytes) == (0, 0)
