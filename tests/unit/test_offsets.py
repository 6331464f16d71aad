"""The ledgers: a commit covers finished records alone, whatever order they finish in."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay.records import Partition, Record
from forebay.stream.offsets import Offsets
from tests.unit.builders import record

P0, P1 = Partition("requests", 0), Partition("requests", 1)


def opened(offsets: Offsets, *numbers: int, partition: int = 0) -> list[Record]:
    found = [record(offset=number, partition=partition) for number in numbers]
    for one in found:
        assert offsets.opened(one)
    return found


def ready(*partitions: Partition) -> Offsets:
    offsets = Offsets()
    offsets.assigned(partitions or (P0,))
    return offsets


def test_the_watermark_waits_for_the_first_open_record() -> None:
    offsets = ready()
    records = opened(offsets, 0, 1, 2, 3)
    marks = []
    for number in (3, 1, 0, 2):
        offsets.closed(records[number])
        marks.append(offsets.committable().get(P0))
    assert marks == [0, 0, 2, 4]


def test_a_stuck_record_holds_its_own_partition_and_no_other() -> None:
    offsets = ready(P0, P1)
    stuck, *_ = opened(offsets, 0, 1, 2)
    free = opened(offsets, 0, 1, 2, partition=1)
    for one in free:
        offsets.closed(one)
    assert offsets.committable() == {P0: 0, P1: 3}
    offsets.closed(stuck)
    assert offsets.committable()[P0] == 1


def test_gaps_of_compaction_and_markers_are_passed_over() -> None:
    offsets = ready()
    first, second = opened(offsets, 5, 90)
    offsets.closed(first)
    assert offsets.committable() == {P0: 90}
    offsets.closed(second)
    assert offsets.committable() == {P0: 91}
    offsets.passed(P0, 95)
    assert offsets.committable() == {P0: 95}
    offsets.passed(P0, 93)
    assert offsets.committable() == {P0: 95}


def test_passing_markers_does_not_pass_an_open_record() -> None:
    offsets = ready()
    (one,) = opened(offsets, 7)
    offsets.passed(P0, 20)
    assert offsets.committable() == {P0: 7}
    offsets.closed(one)
    assert offsets.committable() == {P0: 20}


def test_a_partition_that_was_never_read_has_nothing_to_commit() -> None:
    assert ready().committable() == {}


def test_records_of_unassigned_partitions_are_not_opened() -> None:
    offsets = ready(P0)
    assert not offsets.opened(record(partition=1))
    offsets.forgotten([P0])
    assert not offsets.opened(record())
    assert len(offsets) == 0


def test_an_outcome_of_an_earlier_assignment_closes_nothing() -> None:
    offsets = ready()
    (old,) = opened(offsets, 4)
    offsets.forgotten([P0])
    offsets.assigned([P0])
    (again,) = opened(offsets, 4)
    assert not offsets.holds(old)
    assert offsets.holds(again)
    offsets.closed(old)
    assert offsets.committable() == {P0: 4}
    offsets.closed(again)
    assert offsets.committable() == {P0: 5}


def test_another_assignment_leaves_the_ledgers_of_kept_partitions_alone() -> None:
    offsets = ready(P0)
    (one,) = opened(offsets, 0)
    offsets.assigned([P1])
    assert offsets.holds(one)
    offsets.closed(one)
    assert offsets.committable() == {P0: 1}


def test_an_abandoned_record_keeps_the_watermark_below_it_but_is_not_waited_for() -> None:
    offsets = ready()
    first, second = opened(offsets, 0, 1)
    offsets.abandoned(first)
    ((_, ledger),) = offsets
    assert ledger.running == 1
    offsets.closed(second)
    assert ledger.running == 0
    assert offsets.committable() == {P0: 0}


def test_a_mark_is_asked_for_once_and_again_where_the_commit_was_refused() -> None:
    offsets = ready()
    (one,) = opened(offsets, 0)
    offsets.closed(one)
    marks = offsets.committable()
    offsets.requested(marks)
    assert offsets.committable() == {}
    offsets.refused(P0)
    assert offsets.committable() == marks
    offsets.requested(marks)
    offsets.committed(P0, 1)
    assert offsets.committable() == {}


def test_only_the_partitions_asked_for_are_committable() -> None:
    offsets = ready(P0, P1)
    for number in (0, 1):
        (one,) = opened(offsets, 0, partition=number)
        offsets.closed(one)
    assert offsets.committable([P1]) == {P1: 1}
    assert offsets.committable([Partition("other", 3)]) == {}


@given(st.data())
def test_a_ledger_agrees_with_a_list_of_everything_that_was_read(data: st.DataObject) -> None:
    offsets, position = ready(), data.draw(st.integers(0, 5))
    read: list[Record] = []
    finished: set[int] = set()
    for _ in range(data.draw(st.integers(0, 40))):
        unfinished = [one for one in read if one.offset not in finished]
        step: Any = data.draw(st.sampled_from(["read", "pass", "finish"] if unfinished else ["read", "pass"]))
        if step == "finish":
            one = data.draw(st.sampled_from(unfinished))
            finished.add(one.offset)
            offsets.closed(one)
        else:
            position += data.draw(st.integers(0, 3))
            if step == "read":
                read += opened(offsets, position)
                position += 1
            else:
                offsets.passed(P0, position)
        waiting = [one.offset for one in read if one.offset not in finished]
        ((_, ledger),) = offsets
        expected = min(waiting) if waiting else ledger.watermark
        assert ledger.watermark == expected
        assert ledger.open_count == ledger.running == len(waiting)
        if not waiting and read:
            assert ledger.watermark == max(position, read[-1].offset + 1)
