"""Duplicates of a request id: one partition's window, and what becomes of records in every order of things."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.records import Partition, Record
from forebay.stream.duplicates import Duplicates, Fate, Window, digest_of, stamp_of

SPAN = 100
NOW = 10_000_000
PLACE = Partition("t", 0)


@dataclass
class Ask:
    """Something with a record and an id."""

    record: Record
    id: str


def ask(offset: int, id: str = "a", stamp: int = 1_000, headers: list[tuple[str, bytes | None]] | None = None) -> Ask:
    return Ask(Record("t", 0, offset, None, b"", headers or [], stamp), id)


def offsets(found: object) -> list[int]:
    return [one.record.offset for one in found]  # type: ignore[attr-defined]


@pytest.fixture
def duplicates() -> Duplicates:
    made = Duplicates(SPAN, 1_000)
    made.assigned([PLACE])
    return made


def test_a_repeat_waits_for_the_first_and_is_finished_with_it(duplicates: Duplicates) -> None:
    assert duplicates.admit(ask(0), NOW) is Fate.FIRST
    assert duplicates.admit(ask(1), NOW) is Fate.WAITS
    assert duplicates.admit(ask(2, "other"), NOW) is Fate.FIRST
    assert (duplicates.waiting, offsets(duplicates)) == (1, [1])
    finished, following = duplicates.answered(ask(0).record, retriable=False)
    assert (offsets(finished), following, duplicates.waiting) == ([1], None, 0)
    assert duplicates.admit(ask(3), NOW) is Fate.REPEATS


def test_after_an_error_that_asks_for_another_try_the_next_in_line_has_it(duplicates: Duplicates) -> None:
    for offset in range(4):
        duplicates.admit(ask(offset), NOW)
    finished, following = duplicates.answered(ask(0).record, retriable=True)
    assert following is not None
    assert (list(finished), following.record.offset, duplicates.waiting) == ([], 1, 2)
    assert duplicates.admit(ask(4), NOW) is Fate.WAITS
    finished, following = duplicates.answered(ask(1).record, retriable=False)
    assert (offsets(finished), following, duplicates.waiting) == ([2, 3, 4], None, 0)


def test_a_retry_that_comes_after_such_an_error_is_a_request_like_any_other(duplicates: Duplicates) -> None:
    duplicates.admit(ask(0), NOW)
    duplicates.answered(ask(0).record, retriable=True)
    assert duplicates.admit(ask(1), NOW) is Fate.FIRST


def test_an_id_may_be_used_again_when_its_window_is_over(duplicates: Duplicates) -> None:
    duplicates.admit(ask(0, stamp=1_000), NOW)
    assert duplicates.admit(ask(1, stamp=1_000 + SPAN), NOW) is Fate.WAITS
    assert duplicates.admit(ask(2, stamp=1_001 + SPAN), NOW) is Fate.FIRST, "although the first is still in flight"
    assert offsets(duplicates.answered(ask(0).record, retriable=False)[0]) == [1]
    assert duplicates.admit(ask(3, stamp=1_001 + SPAN), NOW) is Fate.WAITS


def test_a_producer_whose_clock_is_slow_is_protected_like_the_others(duplicates: Duplicates) -> None:
    duplicates.admit(ask(0, "quick", stamp=90_000), NOW)
    assert duplicates.admit(ask(1, "slow", stamp=5), NOW) is Fate.FIRST
    assert duplicates.admit(ask(2, "slow", stamp=6), NOW) is Fate.WAITS


def test_a_time_to_come_and_no_time_count_as_now() -> None:
    assert stamp_of(ask(0, stamp=NOW + 5).record, NOW) == NOW
    assert stamp_of(ask(0, stamp=0).record, NOW) == NOW
    assert stamp_of(ask(0, stamp=-1).record, NOW + 0.7) == NOW
    assert stamp_of(ask(0, stamp=7).record, NOW) == 7


def test_a_record_that_has_no_id_is_nobodys_duplicate(duplicates: Duplicates) -> None:
    nameless = ask(5)
    nameless.id = nameless.record.source
    assert duplicates.admit(nameless, NOW) is Fate.FIRST
    assert duplicates.admit(nameless, NOW) is Fate.FIRST
    assert len(duplicates) == 0


def test_a_replayed_dead_letter_is_no_duplicate_of_the_request_that_failed(duplicates: Duplicates) -> None:
    first, again = ask(0), ask(1, headers=[("forebay-replays", b"1")])
    assert duplicates.admit(first, NOW) is Fate.FIRST
    assert duplicates.admit(again, NOW) is Fate.FIRST
    assert duplicates.admit(ask(2, headers=[("forebay-replays", b"1")]), NOW) is Fate.WAITS
    assert digest_of(first.record, "a") != digest_of(first.record, "b")


def test_partitions_know_nothing_of_each_other_and_one_that_is_gone_is_forgotten(duplicates: Duplicates) -> None:
    duplicates.assigned([Partition("t", 1)])
    elsewhere = Ask(Record("t", 1, 0, None, b"", [], 1_000), "a")
    assert duplicates.admit(ask(0), NOW) is Fate.FIRST
    assert duplicates.admit(elsewhere, NOW) is Fate.FIRST
    duplicates.admit(ask(1), NOW)
    assert offsets(duplicates.forgotten([PLACE])) == [1]
    assert (duplicates.waiting, len(duplicates)) == (0, 1)
    assert duplicates.answered(ask(0).record, retriable=False) == ((), None)
    duplicates.assigned([PLACE])
    assert duplicates.admit(ask(0), NOW) is Fate.FIRST


def test_those_that_wait_for_an_abandoned_record_are_abandoned_with_it(duplicates: Duplicates) -> None:
    for offset in range(3):
        duplicates.admit(ask(offset), NOW)
    assert offsets(duplicates.abandoned([ask(0).record, ask(7).record])) == [1, 2]
    assert duplicates.waiting == 0
    assert duplicates.admit(ask(3), NOW) is Fate.FIRST


def test_memory_is_bounded_and_the_newest_half_is_always_known() -> None:
    window = Window(SPAN, 1_000)
    for number in range(5_000):
        window.remember(b"%d" % number, 1_000)
        assert len(window) <= 1_000
    assert window.forgotten == 4_000
    assert all(window.admit(ask(n), b"%d" % n, 1_000) is Fate.REPEATS for n in range(4_500, 5_000))


def test_ids_whose_window_is_over_leave_without_being_called_forgotten_early() -> None:
    window = Window(SPAN, 1_000)
    for number in range(5_000):
        window.remember(b"%d" % number, 1_000 + number)
    assert len(window) <= 2 * SPAN + 2
    assert window.forgotten == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_record_is_answered_once_or_stands_behind_one_that_was(data: st.DataObject) -> None:
    """Whatever the order of reading and answering, of times, and of errors that ask for another try."""
    window = Window(SPAN, 1_000)
    ids: list[str] = []
    clocks: list[int] = []
    began: dict[int, int] = {}
    running: set[int] = set()
    good: dict[str, list[int]] = defaultdict(list)
    passed: dict[int, int] = {}
    read_by: dict[int, int] = {}
    clock = 0

    def answer(offset: int, *, retriable: bool) -> None:
        running.discard(offset)
        if not retriable:
            good[ids[offset]].append(offset)
        finished, following = window.answered(offset, retriable=retriable)
        passed.update(dict.fromkeys(offsets(finished), offset))
        read_by.update(dict.fromkeys(offsets(finished), len(ids)))
        if following is not None:
            running.add(following.record.offset)
            began[following.record.offset] = clock

    for _ in range(data.draw(st.integers(1, 30))):
        if running and data.draw(st.booleans()):
            answer(data.draw(st.sampled_from(sorted(running))), retriable=data.draw(st.booleans()))
            continue
        id, stamp = data.draw(st.sampled_from("ab")), max(clock, 1_000) + data.draw(st.integers(-60, 60))
        clock = max(clock, stamp)
        asked = ask(len(ids), id, stamp)
        ids.append(id)
        clocks.append(clock)
        fate = window.admit(asked, id.encode(), stamp)
        if fate is Fate.FIRST:
            running.add(asked.record.offset)
            began[asked.record.offset] = clock
        elif fate is Fate.REPEATS:
            passed[asked.record.offset] = -1
    while running:
        answer(min(running), retriable=False)

    assert list(window) == []
    assert began.keys() | passed.keys() == set(range(len(ids)))
    assert not began.keys() & passed.keys()
    for offset, first in passed.items():
        answers = good[ids[offset]]
        spared = first in answers or any(abs(clocks[offset] - began[one]) <= SPAN or one > offset for one in answers)
        # What waits for a first that asks for another try goes with it where a later window has begun by then: that
        # one is the other try (decision 16), and may fail as well.
        later = [one for one in began if ids[one] == ids[offset] and offset < one < read_by.get(offset, 0)]
        assert spared or later, f"{offset} has no outcome, and nothing with its id has a good one"
    for found in good.values():
        for one, other in zip(sorted(found), sorted(found)[1:], strict=False):
            assert clocks[other] - clocks[one] > SPAN, f"{one} and {other} were both answered"
