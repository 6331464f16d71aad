"""Requests under suspicion travel in the commit's metadata, and the next owner goes on counting."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import DeviceLostError
from forebay.inference.messages import Run
from forebay.records import Partition, Record
from forebay.stream import ahead, suspects
from forebay.stream.offsets import Offsets
from tests.unit.test_worker import P0, VECTOR, Scene, codes

T0 = Partition("requests", 0)


def record(offset: int, stamp: int | None = None) -> Record:
    """A record of the first assignment."""
    return Record("requests", 0, offset, None, b"", [], 1_000 + offset if stamp is None else stamp, epoch=1)


def owner(base: int = 0, note: str = "") -> Offsets:
    offsets = Offsets()
    offsets.assigned([T0])
    offsets.recall(T0, base, note)
    return offsets


def commit(offsets: Offsets) -> tuple[int, str]:
    marks = offsets.committable(with_news=True)
    notes = offsets.notes(marks)
    offsets.requested(marks)
    return marks[T0], notes.get(T0, "")


def returned(offsets: Offsets) -> dict[int, int]:
    return {offset: attempts for (_, _, offset), attempts in offsets.returning.items()}


# ---------------------------------------------------------------------- the text


@settings(deadline=None)
@given(
    st.integers(0, 2**40),
    st.dictionaries(st.integers(0, 60_000), st.integers(0, 255), min_size=1, max_size=suspects.MOST),
    st.integers(-1, 2**42),
)
def test_a_text_says_what_was_written(base: int, gaps: dict[int, int], stamp: int) -> None:
    attempts = {base + gap: count for gap, count in gaps.items()}
    assert suspects.read(base, suspects.write(base, stamp, attempts)) == suspects.Suspects(
        min(attempts), stamp, attempts
    )


def test_a_text_is_bounded_and_keeps_those_with_the_most_attempts() -> None:
    chance = random.Random(3)
    first = 2**62
    attempts = {first + place: 1 for place in chance.sample(range(60_000), 5_000)} | {first: 1}
    guilty = chance.sample(sorted(attempts), 40)
    attempts |= {offset: chance.randrange(2, 999) for offset in guilty}
    text = suspects.write(first, 2**42, attempts)
    assert len(text) < 1_100
    found = suspects.read(first, text)
    assert found is not None
    assert len(found.attempts) == suspects.MOST
    assert {offset: found.attempts[offset] for offset in guilty} == {one: min(attempts[one], 255) for one in guilty}


def test_both_parts_of_a_note_fit_into_what_a_broker_takes() -> None:
    chance = random.Random(5)
    offsets = owner()
    records = [record(2**50 + number) for number in range(ahead.SPAN + 500)]
    for one in records:
        offsets.opened(one)
    offsets.closed_all([one for one in records[1:] if chance.random() < 0.5])
    offsets.suspect((one, chance.randrange(255)) for one in chance.sample(records, 600) if offsets.is_open(one))
    _, note = commit(offsets)
    assert len(note) < 4_096


@pytest.mark.parametrize("change", range(40))
def test_a_damaged_text_never_adds_an_attempt(change: int) -> None:
    chance = random.Random(change)
    attempts = {10 + place: 2 for place in chance.sample(range(400), 100)}
    text = bytearray(suspects.write(10, 1_000, attempts).encode())
    place = chance.randrange(text.rindex(b" ") + 1, len(text))
    text[place] = (text[place] + 1 - 33) % 90 + 33
    found = suspects.read(10, text.decode())
    assert found is None or found.attempts == attempts


@pytest.mark.parametrize("text", ["", "suspects1", "suspects2 0 0 0 x", "suspects1 0 a 0 x", "forebay1 0 0 0 x"])
def test_a_text_that_is_not_ours_says_nothing(text: str) -> None:
    assert suspects.read(0, text) is None


# ---------------------------------------------------------------------- from one owner to the next


def test_the_next_owner_meets_the_suspects_with_their_attempts() -> None:
    first = owner()
    for number in range(6):
        first.opened(record(number))
    first.closed(record(0))
    assert not first.has_suspect_news
    first.suspect([(record(2), 1), (record(4), 2)])
    assert first.has_suspect_news
    base, note = commit(first)
    assert not first.has_suspect_news
    second = owner(base, note)
    assert len(second.opened_all(map(record, range(base, 6)))) == 5
    assert returned(second) == {2: 1, 4: 2}


def test_a_note_says_beside_each_other_what_is_finished_ahead_and_who_is_suspect() -> None:
    first = owner()
    found = [record(number) for number in range(8)]
    first.opened_all(found)
    first.closed_all([one for one in found if one.offset in (1, 2, 5)])
    first.suspect([(found[0], 1)])
    base, note = commit(first)
    second = owner(base, note)
    assert [one.offset for one in second.opened_all(map(record, range(8)))] == [0, 3, 4, 6, 7]
    assert returned(second) == {0: 1}
    third = owner(*commit(second))
    third.opened_all(map(record, range(8)))
    assert returned(third) == {0: 1}


def test_suspects_that_the_second_owner_never_read_are_handed_on_to_the_third() -> None:
    first = owner()
    first.opened_all(map(record, range(10)))
    first.suspect([(record(7), 2), (record(9), 1)])
    second = owner(*commit(first))
    second.opened_all(map(record, range(3)))
    second.closed_all([record(0), record(1)])
    third = owner(*commit(second))
    third.opened_all(map(record, range(2, 10)))
    assert returned(third) == {7: 2, 9: 1}


def test_suspects_that_have_their_outcome_are_forgotten_with_the_next_commit() -> None:
    first = owner()
    first.opened_all(map(record, range(3)))
    first.suspect([(record(1), 1)])
    commit(first)
    first.closed(record(1))
    assert not first.is_open(record(1))
    first.suspect([])
    assert first.has_suspect_news
    _, note = commit(first)
    assert "suspects" not in note


@pytest.mark.parametrize("what", ["another base", "another topic", "the first was compacted away"])
def test_what_is_in_doubt_is_not_believed(what: str) -> None:
    first = owner()
    first.opened_all(map(record, range(6)))
    first.suspect([(record(2), 2), (record(4), 2)])
    base, note = commit(first)
    second = owner(base + (what == "another base"), note)
    for number in range(6):
        if what != "the first was compacted away" or number != 2:
            second.opened(record(number, 7 if what == "another topic" else None))
    assert returned(second) == {}


def test_a_refused_commit_says_it_again() -> None:
    first = owner()
    first.opened(record(0))
    first.suspect([(record(0), 1)])
    commit(first)
    first.refused(T0)
    assert first.has_suspect_news
    assert "suspects1" in commit(first)[1]


# ---------------------------------------------------------------------- in the corridor


def successor(scene: Scene, **values: object) -> Scene:
    """The worker that the group gives the partitions to afterwards."""
    other = Scene(**values)  # type: ignore[arg-type]
    other.broker.topics, other.broker.committed = scene.broker.topics, scene.broker.committed
    other.broker.notes = scene.broker.notes
    return other.join()


def sizes(scene: Scene) -> list[int]:
    found: list[Run] = list(scene.replica.jobs)
    return [job.requests for job in found]


def restart(scene: Scene) -> None:
    """Let the replica that died be up again."""
    scene.turn(5, seconds=1.0)
    scene.replica.get_ready(VECTOR)
    scene.turn(3)


def test_a_worker_that_dies_after_a_replica_did_hands_the_suspects_on() -> None:
    first = Scene(batch__max_batch_size=4).join()
    first.publish("a", "killer", "c", "d", "e")
    first.turn(2)
    first.replica.die()
    first.turn(3, seconds=0.3)
    assert "suspects1" in first.broker.notes[P0]
    second = successor(first, batch__max_batch_size=4)
    second.turn(2)
    assert sizes(second) == [1]  # alone, and before what is new
    while second.worker._custody.requests != 0:
        second.finish()
    assert sorted(second.answered) == ["a", "c", "d", "e", "killer"]
    second.turn(3, seconds=0.3)
    assert not second.broker.notes[P0]


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_a_request_that_ends_every_worker_is_poisoned_after_its_attempts(max_attempts: int) -> None:
    scene = Scene(max_attempts=max_attempts, max_restarts=0, batch__max_batch_size=4).join()
    scene.publish("a", "killer", "c")
    lives = 0
    while scene.worker._custody.requests or not lives:
        lives += 1
        scene.turn(2)
        while scene.replica.jobs and not killer_runs(scene):
            scene.finish()
        if scene.replica.jobs:
            scene.replica.die()
            with pytest.raises(DeviceLostError):
                scene.turn()
            leave(scene)
            scene = successor(scene, max_attempts=max_attempts, max_restarts=0, batch__max_batch_size=4)
            scene.turn()
    assert codes(scene.broker) == {"a": "model_error", "c": "model_error", "killer": "poisoned"}
    scene.turn(3, seconds=0.3)
    assert scene.committed == {P0: 3}
    assert lives <= max(max_attempts, 2) + 1


def killer_runs(scene: Scene) -> bool:
    (replica,) = scene.pool._replicas
    return any(one.id == "killer" for one in replica.running[0][0].requests)


def leave(scene: Scene) -> None:
    from forebay.handing_on import hand_on

    worker = scene.worker
    hand_on(worker._committer, worker._outbox, worker._clock, worker._poll_while_draining, worker._settle)


def test_suspects_of_a_partition_that_is_given_back_are_handed_on() -> None:
    first = Scene(batch__max_batch_size=4, delivery__commit_interval_ms=60_000).join()
    first.publish("a", "b")
    first.turn(2)
    first.replica.die()
    first.turn(1)
    first.consumer.revoke([P0])
    first.turn(2)
    assert "suspects1" in first.broker.notes[P0]
    second = successor(first, batch__max_batch_size=4)
    second.turn(2)
    assert sizes(second) == [1]
