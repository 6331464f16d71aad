"""What is finished ahead of the watermark travels in the commit's metadata, and skips nothing that has no outcome."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.records import Partition, Record
from forebay.stream import ahead
from forebay.stream.ahead import SPAN, Ahead
from forebay.stream.offsets import Offsets

P0 = Partition("requests", 0)


def record(offset: int, stamp: int | None = None) -> Record:
    return Record("requests", 0, offset, None, b"", [], 1_000 + offset if stamp is None else stamp)


def owner(base: int = 0, note: str | None = None) -> Offsets:
    offsets = Offsets()
    offsets.assigned([P0])
    if note is not None:
        offsets.recall(P0, base, note)
    return offsets


def work(offsets: Offsets, numbers: Any, finished: Any) -> list[int]:
    """Read these offsets and finish some; returns those that were left to do."""
    found = [one for one in map(record, numbers) if offsets.opened(one)]
    for one in found:
        if one.offset in finished:
            offsets.closed(one)
    return [one.offset for one in found]


def commit(offsets: Offsets) -> tuple[int, str | None]:
    marks = offsets.committable(with_news=True)
    notes = offsets.notes(marks)
    offsets.requested(marks)
    return marks[P0], notes.get(P0)


# ---------------------------------------------------------------------- the text


@settings(deadline=None)
@given(st.integers(0, 2**40), st.sets(st.integers(1, 3_000), min_size=1), st.integers(-1, 2**42))
def test_a_text_says_what_was_written(base: int, gaps: set[int], stamp: int) -> None:
    offsets = {base + gap for gap in gaps}
    found = ahead.read(base, ahead.write(base, min(offsets), stamp, offsets))
    assert found == Ahead(min(offsets), stamp, offsets, max(offsets))


def test_a_text_is_never_longer_than_a_broker_takes() -> None:
    chance = random.Random(7)
    first = 2**62
    offsets = {first, *(first + place for place in range(SPAN * 3) if chance.random() < 0.5)}
    text = ahead.write(first - 1, first, 2**42, offsets)
    assert len(text) < 2_700
    assert text.isascii()
    found = ahead.read(first - 1, text)
    assert found is not None
    assert found.offsets == {offset for offset in offsets if offset < first + SPAN}


@pytest.mark.parametrize("change", range(60))
def test_a_damaged_text_never_adds_an_offset(change: int) -> None:
    """The compressed bits carry a checksum; the rest is compared with what is read."""
    chance = random.Random(change)
    offsets = {12, *chance.sample(range(13, 400), 100)}
    text = bytearray(ahead.write(10, 12, 1_012, offsets).encode())
    place = chance.randrange(text.rindex(b" ") + 1, len(text))
    text[place] = (text[place] + 1 - 33) % 90 + 33
    found = ahead.read(10, text.decode())
    assert found is None or found.offsets == offsets


@pytest.mark.parametrize(
    "text", ["", "x", "checkpoint=7", "forebay1", "forebay1 a b c d", "forebay1 10 12 0 %%%", "forebay1 10 12 0 ", "é"]
)
def test_what_somebody_else_has_written_is_passed_over(text: str) -> None:
    assert ahead.read(10, text) is None


def test_another_format_another_offset_and_a_first_below_it_are_passed_over() -> None:
    text = ahead.write(10, 12, 0, [12])
    assert ahead.read(10, text) is not None
    assert ahead.read(9, text) is None
    assert ahead.read(10, text.replace("forebay1", "forebay2")) is None
    assert ahead.read(10, ahead.write(10, 10, 0, [10])) is None


def test_a_text_that_unpacks_to_more_than_a_span_is_passed_over() -> None:
    import base64
    import zlib

    bomb = base64.b85encode(zlib.compress(b"\xff" * 1_000_000)).decode()
    assert ahead.read(10, f"forebay1 10 12 0 {bomb}") is None


# ---------------------------------------------------------------------- from one owner to the next


def test_the_next_owner_does_only_what_has_no_outcome() -> None:
    base, note = commit_after(range(10, 20), finished={11, 12, 15, 19})
    assert base == 10
    after = owner(base, note)
    assert work(after, range(10, 25), finished=set()) == [10, 13, 14, 16, 17, 18, 20, 21, 22, 23, 24]
    assert after.skipped == 4


def commit_after(numbers: Any, finished: Any) -> tuple[int, str | None]:
    before = owner()
    work(before, numbers, finished)
    return commit(before)


def test_what_was_skipped_lets_the_watermark_pass() -> None:
    base, note = commit_after(range(5), finished={1, 2, 4})
    after = owner(base, note)
    work(after, range(5), finished={0, 3})
    assert commit(after) == (5, None)


def test_a_prefix_alone_needs_no_note() -> None:
    assert commit_after(range(5), finished={0, 1, 2}) == (3, None)
    assert commit_after(range(5), finished=set()) == (0, None)


def test_a_topic_that_was_made_again_is_read_whole() -> None:
    """Deleted and recreated: the same offsets are other records."""
    base, note = commit_after(range(5), finished={1, 2, 4})
    after = owner(base, note)
    others = [record(offset, stamp=9_000 + offset) for offset in range(5)]
    assert all(after.opened(one) for one in others)
    assert after.skipped == 0


def test_a_first_record_that_is_not_there_any_more_leaves_everything_in_doubt() -> None:
    base, note = commit_after(range(5), finished={1, 2, 4})
    after = owner(base, note)
    assert work(after, [0, 2, 3, 4], finished=set()) == [0, 2, 3, 4]


def test_a_reader_that_starts_behind_the_first_is_in_doubt() -> None:
    base, note = commit_after(range(5), finished={1, 2, 4})
    assert work(owner(base, note), [3, 4], finished=set()) == [3, 4]


def test_a_second_owner_that_dies_early_hands_on_what_it_has_not_read_yet() -> None:
    finished = {1, *range(100, 200)}
    base, note = commit_after(range(200), finished)
    second = owner(base, note)
    work(second, range(50), finished=set())
    third = owner(*commit(second))
    assert set(work(third, range(200), finished=set())) == set(range(200)) - finished


def test_what_is_in_doubt_is_not_handed_on() -> None:
    base, note = commit_after(range(200), finished={50, 150})
    second = owner(base, note)
    work(second, range(10), finished={5})
    mark, handed_on = commit(second)
    found = ahead.read(mark, handed_on)
    assert found is not None
    assert found.offsets == {5}


def test_news_ahead_of_a_watermark_that_stands_are_committable_once() -> None:
    offsets = owner()
    work(offsets, range(5), finished={2})
    commit(offsets)
    assert offsets.committable(with_news=True) == {}
    work(offsets, range(5, 7), finished={5})
    assert offsets.committable() == {}
    assert offsets.committable(with_news=True) == {P0: 0}
    commit(offsets)
    assert offsets.committable(with_news=True) == {}


def test_news_whose_commit_was_refused_are_committable_again() -> None:
    offsets = owner()
    work(offsets, range(5), finished={2})
    commit(offsets)
    offsets.refused(P0)
    assert offsets.committable(with_news=True) == {P0: 0}


@settings(deadline=None)
@given(st.data())
def test_over_any_number_of_owners_nothing_is_skipped_that_has_no_outcome(data: st.DataObject) -> None:
    """Each owner reads on from the last commit, finishes what it likes in any order, commits now and then and dies."""
    log = sorted(data.draw(st.sets(st.integers(0, 120), min_size=5)))
    answered: dict[int, int] = {}
    base, note = 0, None
    for _ in range(data.draw(st.integers(1, 5))):
        now = owner(base, note)
        held: list[Record] = []
        for one in [record(offset) for offset in log if offset >= base][: data.draw(st.integers(0, 120))]:
            if now.opened(one):
                held.append(one)
            else:
                assert answered.get(one.offset), "a record without an outcome was skipped"
            if held and data.draw(st.booleans()):
                done = held.pop(data.draw(st.integers(0, len(held) - 1)))
                now.closed(done)
                answered[done.offset] = answered.get(done.offset, 0) + 1
                if data.draw(st.booleans()) and now.committable(with_news=True):
                    base, note = commit(now)
    assert all(answered.get(offset) for offset in log if offset < base)
