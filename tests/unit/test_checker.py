"""The checker of the fault tests, checked itself: clean histories pass, and every kind of damage is found by its name.

First a small history by hand, damaged so that exactly one invariant breaks; then random histories, of deaths and
aborted transactions too, that pass, and the same with one thing damaged at a random place.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from tests.faults.checker import INVARIANTS, check, verify
from tests.faults.history import (
    Fate,
    Fault,
    History,
    Logged,
    Place,
    Promise,
    Report,
    Sample,
    has_letter,
    is_error,
    place_name,
    source_of,
)

ECHO = ("kafka_correlationId", b"c")
SECRET = "hunter2-hunter2"
Dice = random.Random
Damage = Callable[[History, Dice], History]


def request(partition: int, offset: int) -> Logged:
    name = b"%d-%d" % (partition, offset)
    return Logged("in", partition, offset, name, b"ask " + name, (ECHO, ("mine", name)))


def outcome(of: Logged, partition: int, offset: int, code: str | None = None) -> Logged:
    """A result, or an error with this code."""
    told = [("status", b"error"), ("error-code", code.encode())] if code else [("status", b"ok")]
    headers = (*told, ("batch-size", b"4"), ("source", place_name(of.position).encode()), ECHO)
    return Logged("out", partition, offset, of.key, b"answer to " + (of.value or b""), headers)


def letter(of: Logged, offset: int, code: str) -> Logged:
    own = (
        ("kafka_dlt-original-topic", of.topic.encode()),
        ("kafka_dlt-original-partition", of.partition.to_bytes(4, "big")),
        ("kafka_dlt-original-offset", of.offset.to_bytes(8, "big")),
        ("kafka_dlt-exception-message", b"it is bad"),
        ("forebay-error-code", code.encode()),
    )
    return Logged("dead", 0, offset, of.key, of.value, (*of.headers, *own))


def answers(asked: Logged, found: Logged) -> str | None:
    return None if found.value == b"answer to " + (asked.value or b"") else f"it says {found.value!r}"


class Writer:
    """Writes a clean history: requests are answered partition by partition in order, with faults in between."""

    def __init__(self, dice: Dice, promise: Promise) -> None:
        self.dice = dice
        self.promise = promise
        self.inputs = [request(p, offset) for p in range(2) for offset in range(dice.randrange(3, 12))]
        self.codes = {
            one.position: dice.choice([None, None, None, "model_error", "deadline_exceeded"]) for one in self.inputs
        }
        self.ends = Counter(one.place for one in self.inputs)
        self.done: dict[Place, int] = dict.fromkeys(self.ends, 0)
        self.committed: dict[Place, int] = {}
        self.outcomes: list[Logged] = []
        self.letters: list[Logged] = []
        self.invisible: set[tuple[str, int, int]] = set()
        self.samples: list[Sample] = []
        self.faults: list[Fault] = []

    def write(self) -> History:
        while any(self.done[place] < end for place, end in self.ends.items()):
            place = self.dice.choice([place for place, end in self.ends.items() if self.done[place] < end])
            batch = self.inputs_of(place)[self.done[place] : self.done[place] + self.dice.randrange(1, 4)]
            dies = self.dice.random() < 0.15
            wrote = self.answer(batch)
            if self.promise.guarantee == "exactly_once" and dies:
                self.invisible.update(wrote)
                continue
            self.done[place] += len(batch)
            if dies:
                self.faults.append(Fault("killed", dict(self.committed), dict(self.ends)))
                self.done = {one: self.committed.get(one, 0) for one in self.ends}
            elif self.promise.guarantee == "exactly_once" or self.dice.random() < 0.5:
                self.commit()
        self.commit()
        return self.history()

    def inputs_of(self, place: Place) -> list[Logged]:
        return [one for one in self.inputs if one.place == place]

    def answer(self, batch: list[Logged]) -> list[tuple[str, int, int]]:
        wrote = []
        for one in batch:
            code = self.codes[one.position]
            if code == "model_error":
                self.letters.append(letter(one, len(self.letters), code))
                wrote.append(self.letters[-1].position)
            partition = one.offset % 3 % 2  # as a key decides: the same at every try
            offset = sum(found.partition == partition for found in self.outcomes)
            self.outcomes.append(outcome(one, partition, offset, code))
            wrote.append(self.outcomes[-1].position)
        return wrote

    def commit(self) -> None:
        self.committed = dict(self.done)
        self.samples.append(Sample(dict(self.committed), self.log_ends()))

    def log_ends(self) -> dict[Place, int]:
        return {**Counter(one.place for one in (*self.outcomes, *self.letters))}

    def history(self) -> History:
        history = History(
            self.promise,
            tuple(self.inputs),
            tuple(self.outcomes),
            tuple(self.letters),
            frozenset(self.invisible),
            self.committed,
            dict(self.ends),
            {place: (end, end) for place, end in self.log_ends().items()},
            tuple(self.samples),
            tuple(self.faults),
            journal={one.key or b"": Fate.ACKED for one in self.inputs},
            secrets=(SECRET,),
            answers=answers,
        )
        return replace(history, workers=(a_worker(history),))


def a_worker(history: History) -> Report:
    """A report that agrees with the logs of a history."""
    seen = [one for one in history.outcomes if one.position not in history.invisible]
    counters = Counter((one.header("error-code") or b"ok").decode() for one in seen)
    letters = sum(one.position not in history.invisible for one in history.letters)
    return Report(
        "worker",
        counters={**counters, "dead_letters": letters},
        highest={"rss": 90.0},
        bounds={"rss": 100.0},
        rebalances=1,
        allowed_rebalances=1,
        texts={"log": "all is well"},
    )


# ---------------------------------------------------------------------- by hand


def small(guarantee: str = "at_least_once", ordering: str = "none") -> History:
    """Five requests of one partition: three results, an error with its letter, one that came too late."""
    asked = [request(0, offset) for offset in range(5)]
    codes = [None, None, "model_error", "deadline_exceeded", None]
    told = [outcome(one, 0, one.offset, code) for one, code in zip(asked, codes, strict=True)]
    history = History(
        Promise(guarantee, ordering),  # type: ignore[arg-type]
        tuple(asked),
        tuple(told),
        (letter(asked[2], 0, "model_error"),),
        committed={("in", 0): 5},
        ends={("in", 0): 5},
        stable={("out", 0): (5, 5)},
        samples=(Sample({("in", 0): 2}, {("out", 0): 2}), Sample({("in", 0): 5}, {("out", 0): 5, ("dead", 0): 1})),
        journal={one.key or b"": Fate.ACKED for one in asked},
        secrets=(SECRET,),
        answers=answers,
    )
    return replace(history, workers=(a_worker(history),))


def worker_with(**changes: object) -> Callable[[History], History]:
    return lambda history: replace(history, workers=(replace(history.workers[0], **changes),))  # type: ignore[arg-type]


def without_workers(history: History) -> History:
    return replace(history, workers=())


def with_outcome(history: History, place: int, **changes: object) -> History:
    told = list(history.outcomes)
    told[place] = replace(told[place], **changes)  # type: ignore[arg-type]
    return replace(history, outcomes=tuple(told))


def with_letter(history: History, **changes: object) -> History:
    return replace(history, letters=(replace(history.letters[0], **changes),))  # type: ignore[arg-type]


def twice(history: History, place: int, **changes: object) -> History:
    """Answer a request again, at the end of the log."""
    again = replace(history.outcomes[place], offset=len(history.outcomes), **changes)  # type: ignore[arg-type]
    return without_workers(replace(history, outcomes=(*history.outcomes, again)))


def killed_before_anything(history: History) -> History:
    return replace(history, faults=(Fault("killed", {}, {("in", 0): 5}),))


def swapped(history: History) -> History:
    """The outcomes of offsets 0 and 1 have changed places in the log."""
    first, second, *rest = history.outcomes
    return replace(history, outcomes=(replace(second, offset=0), replace(first, offset=1), *rest))


def headed(one: Logged, name: str, value: bytes) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((key, value if key == name else old) for key, old in one.headers)


def sampled(*samples: tuple[int, int, int]) -> Callable[[History], History]:
    """Samples of (committed, end of out, end of dead)."""
    found = tuple(Sample({("in", 0): mark}, {("out", 0): out, ("dead", 0): dead}) for mark, out, dead in samples)
    return lambda history: replace(history, samples=found)


GOLDEN: dict[str, tuple[str, Callable[[History], History], tuple[str, str]]] = {
    "a request without an outcome": (
        "V1",
        lambda h: without_workers(replace(h, outcomes=h.outcomes[:4], samples=())),
        ("at_least_once", "none"),
    ),
    "a dead letter without its error": (
        "V1",
        lambda h: without_workers(replace(h, outcomes=(*h.outcomes[:2], *h.outcomes[3:]), samples=())),
        ("at_least_once", "none"),
    ),
    "a duplicate without a fault": ("V2", lambda h: twice(h, 0), ("at_least_once", "none")),
    "a third outcome after one fault": (
        "V2",
        lambda h: twice(twice(killed_before_anything(h), 0), 0),
        ("at_least_once", "none"),
    ),
    "a duplicate of what was committed before the fault": (
        "V2",
        lambda h: twice(replace(h, faults=(Fault("killed", {("in", 0): 3}, {("in", 0): 5}),)), 1),
        ("at_least_once", "none"),
    ),
    "a duplicate of what was sent after the fault": (
        "V2",
        lambda h: twice(replace(h, faults=(Fault("killed", {}, {("in", 0): 1}),)), 1),
        ("at_least_once", "none"),
    ),
    "a duplicate in exactly once, fault or not": (
        "V2",
        lambda h: twice(killed_before_anything(h), 0),
        ("exactly_once", "none"),
    ),
    "duplicates that differ": (
        "V2",
        lambda h: replace(
            twice(killed_before_anything(h), 0, headers=(*h.outcomes[0].headers, ("model", b"2"))), answers=None
        ),
        ("at_least_once", "none"),
    ),
    "an outcome of nothing": (
        "V3",
        lambda h: twice(h, 0, headers=headed(h.outcomes[0], "source", b"in/0/77")),
        ("at_least_once", "none"),
    ),
    "an outcome that names no source": (
        "V3",
        lambda h: twice(h, 0, headers=headed(h.outcomes[0], "source", b"in")),
        ("at_least_once", "none"),
    ),
    "an outcome of a request that was never sent": (
        "V3",
        lambda h: replace(h, journal={**h.journal, b"0-1": Fate.FAILED}),
        ("at_least_once", "none"),
    ),
    "a dead letter of nothing": (
        "V3",
        lambda h: without_workers(replace(h, letters=(*h.letters, letter(request(0, 77), 1, "model_error")))),
        ("at_least_once", "none"),
    ),
    "the answer of a neighbour": (
        "V4",
        lambda h: with_outcome(h, 0, value=h.outcomes[1].value),
        ("at_least_once", "none"),
    ),
    "the key of a neighbour": ("V4", lambda h: with_outcome(h, 0, key=b"0-1"), ("at_least_once", "none")),
    "a correlation id that is not echoed": (
        "V4",
        lambda h: with_outcome(h, 0, headers=h.outcomes[0].headers[:-1]),
        ("at_least_once", "none"),
    ),
    "outcomes out of order": ("V5", lambda h: replace(swapped(h), samples=()), ("at_least_once", "partition")),
    "outcomes out of order in exactly once": (
        "V5",
        lambda h: replace(swapped(h), samples=()),
        ("exactly_once", "none"),
    ),
    "a commit before the outcome": ("V6", sampled((3, 2, 1), (5, 5, 1)), ("at_least_once", "none")),
    "a commit before the dead letter": ("V6", sampled((3, 5, 0), (5, 5, 1)), ("at_least_once", "none")),
    "a commit that moves back": ("V6", sampled((4, 5, 1), (2, 5, 1), (5, 5, 1)), ("at_least_once", "none")),
    "a commit behind the end": ("V6", sampled((6, 5, 1)), ("at_least_once", "none")),
    "an input that is not settled": ("V7", lambda h: replace(h, committed={("in", 0): 4}), ("at_least_once", "none")),
    "a transaction that is still open": (
        "V7",
        lambda h: replace(h, stable={("out", 0): (3, 5)}),
        ("exactly_once", "none"),
    ),
    "something invisible without transactions": (
        "V8",
        lambda h: without_workers(
            replace(twice(killed_before_anything(h), 0), invisible=frozenset({("out", 0, len(h.outcomes))}))
        ),
        ("at_least_once", "none"),
    ),
    "an outcome without its offset": (
        "V8",
        lambda h: replace(h, committed={("in", 0): 4}, promise=replace(h.promise, settled=False), samples=()),
        ("exactly_once", "none"),
    ),
    "a dead letter that is seen before its error": (
        "V8",
        lambda h: without_workers(
            replace(
                h,
                invisible=frozenset(one.position for one in h.outcomes[2:]),
                committed={("in", 0): 2},
                samples=(),
                promise=replace(h.promise, settled=False),
            )
        ),
        ("exactly_once", "none"),
    ),
    "an error without its dead letter": (
        "V9",
        lambda h: without_workers(replace(h, letters=(), samples=())),
        ("at_least_once", "none"),
    ),
    "a dead letter with another value": ("V9", lambda h: with_letter(h, value=b"other"), ("at_least_once", "none")),
    "a dead letter with another key": ("V9", lambda h: with_letter(h, key=None), ("at_least_once", "none")),
    "a dead letter without the request's headers": (
        "V9",
        lambda h: with_letter(h, headers=h.letters[0].headers[2:]),
        ("at_least_once", "none"),
    ),
    "a dead letter that does not say why": (
        "V9",
        lambda h: with_letter(h, headers=headed(h.letters[0], "kafka_dlt-exception-message", b"")),
        ("at_least_once", "none"),
    ),
    "a dead letter of another error": (
        "V9",
        lambda h: with_letter(h, headers=headed(h.letters[0], "forebay-error-code", b"internal")),
        ("at_least_once", "none"),
    ),
    "a dead letter of a result": (
        "V9",
        lambda h: without_workers(replace(h, letters=(*h.letters, letter(h.inputs[0], 1, "model_error")))),
        ("at_least_once", "none"),
    ),
    "two dead letters of one error": (
        "V9",
        lambda h: without_workers(replace(h, letters=(*h.letters, replace(h.letters[0], offset=1)))),
        ("exactly_once", "none"),
    ),
    "memory beyond its bound": ("V10", worker_with(highest={"rss": 101.0}), ("at_least_once", "none")),
    "a secret in the log": ("V11", worker_with(texts={"log": f"password={SECRET}"}), ("at_least_once", "none")),
    "a secret in an error": (
        "V11",
        lambda h: replace(with_outcome(h, 2, value=f"no login with {SECRET}".encode()), answers=None),
        ("at_least_once", "none"),
    ),
    "a secret in a dead letter": (
        "V11",
        lambda h: with_letter(h, headers=headed(h.letters[0], "kafka_dlt-exception-message", SECRET.encode())),
        ("at_least_once", "none"),
    ),
    "a worker that fell over": ("V12", worker_with(code=70), ("at_least_once", "none")),
    "a worker that never ended": ("V12", worker_with(code=None), ("at_least_once", "none")),
    "a counter that is too high": (
        "V13",
        worker_with(counters={"ok": 4, "model_error": 1, "deadline_exceeded": 1, "dead_letters": 1}),
        ("at_least_once", "none"),
    ),
    "a counter that is too low": (
        "V13",
        worker_with(counters={"ok": 3, "model_error": 1, "deadline_exceeded": 1}),
        ("at_least_once", "none"),
    ),
    "more rebalances than faults explain": ("V14", worker_with(rebalances=2), ("at_least_once", "none")),
    "an acknowledged request that is gone": (
        "V15",
        lambda h: replace(h, journal={**h.journal, b"gone": Fate.ACKED}),
        ("at_least_once", "none"),
    ),
    "a request of unknown fate that is there twice": (
        "V15",
        lambda h: replace(
            h,
            inputs=tuple(replace(one, key=b"0-0") if one.offset == 1 else one for one in h.inputs),
            outcomes=tuple(replace(one, key=b"0-0") if one.offset == 1 else one for one in h.outcomes),
            journal={b"0-0": Fate.UNKNOWN},
        ),
        ("at_least_once", "none"),
    ),
    "an id that is answered twice in its window": (
        "V16",
        lambda h: deduplicated(namesakes(h)),
        ("at_least_once", "none"),
    ),
}


def namesakes(history: History) -> History:
    """The first two requests of a partition, and their outcomes, have one id."""

    def renamed(records: tuple[Logged, ...], position: Callable[[Logged], object]) -> tuple[Logged, ...]:
        return tuple(replace(one, key=b"0-0") if position(one) == ("in", 0, 1) else one for one in records)

    inputs = renamed(history.inputs, lambda one: one.position)
    return replace(history, inputs=inputs, outcomes=renamed(history.outcomes, source_of), journal={})


def deduplicated(history: History) -> History:
    return replace(history, promise=replace(history.promise, deduplicate_ms=10))


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_a_clean_history_passes(guarantee: str) -> None:
    verify(small(guarantee, "partition"))


@pytest.mark.parametrize("name", GOLDEN)
def test_one_thing_damaged_breaks_one_invariant_and_no_other(name: str) -> None:
    code, damage, promise = GOLDEN[name]
    found = check(damage(small(*promise)))
    assert {finding.code for finding in found} == {code}, "\n".join(map(str, found))
    with pytest.raises(AssertionError, match=f"{code} "):
        verify(damage(small(*promise)))


def test_every_invariant_has_a_golden_anomaly_and_a_sentence() -> None:
    codes = [one.code for one in INVARIANTS]
    assert codes == [f"V{number}" for number in range(1, 17)]
    assert {code for code, _, _ in GOLDEN.values()} == set(codes)
    assert all(one.rule and one.look.__doc__ for one in INVARIANTS)


def test_a_repeat_needs_no_outcome_where_ids_are_deduplicated_and_only_there() -> None:
    history = namesakes(small())
    gone = [one for one in history.outcomes if source_of(one) == ("in", 0, 1)]
    history = replace(
        history,
        outcomes=tuple(one for one in history.outcomes if one not in gone),
        workers=(),
    )
    assert gone
    verify(deduplicated(history))
    assert {finding.code for finding in check(history)} >= {"V1", "V6"}
    far = tuple(replace(one, timestamp_ms=100 * one.offset + 1) for one in history.inputs)
    assert "V1" in {finding.code for finding in check(deduplicated(replace(history, inputs=far)))}


def test_after_an_error_that_asks_for_another_try_an_id_may_be_answered_again() -> None:
    history = namesakes(small())
    retry = [one for one in history.outcomes if source_of(one) == ("in", 0, 0)]
    failed = outcome(history.inputs[0], *retry[0].place[1:], retry[0].offset, "deadline_exceeded")
    history = replace(
        history, outcomes=tuple(failed if one in retry else one for one in history.outcomes), workers=(), answers=None
    )
    verify(deduplicated(history))


def test_a_duplicate_that_a_fault_explains_is_none() -> None:
    verify(twice(killed_before_anything(small()), 0, headers=headed(small().outcomes[0], "batch-size", b"1")))


def test_a_request_that_expired_at_the_second_try_has_two_different_outcomes_and_that_is_fine() -> None:
    late = outcome(request(0, 0), 0, 5, "deadline_exceeded")
    history = twice(killed_before_anything(small()), 0, headers=late.headers)
    verify(history)


def test_a_value_that_was_too_large_for_the_dead_letters_may_be_left_out() -> None:
    history = small()
    headers = (*history.letters[0].headers[2:], ("forebay-value-left-out", b"too large for this topic"))
    verify(with_letter(history, value=None, headers=headers))


def test_an_aborted_attempt_is_no_outcome() -> None:
    history = small("exactly_once")
    again = replace(history.outcomes[0], offset=5)
    verify(replace(history, outcomes=(*history.outcomes, again), invisible=frozenset({("out", 0, 5)})))


def test_a_finding_shows_a_few_of_many() -> None:
    history = replace(small(), outcomes=(), letters=(), samples=(), workers=())
    [lost] = check(history)
    assert len(lost.evidence) == 5
    assert str(replace(lost, evidence=lost.evidence * 4)).endswith("and 12 more")


# ---------------------------------------------------------------------- at random

PROMISES = st.builds(
    Promise, st.sampled_from(["at_least_once", "exactly_once"]), st.sampled_from(["none", "partition", "key"])
)


def some_visible(history: History, dice: Dice) -> Logged:
    return dice.choice([one for one in history.outcomes if one.position not in history.invisible])


def loses_an_outcome(history: History, dice: Dice) -> History:
    gone = source_of(some_visible(history, dice))
    return replace(history, outcomes=tuple(one for one in history.outcomes if source_of(one) != gone))


def repeats_an_outcome(history: History, dice: Dice) -> History:
    one = some_visible(history, dice)
    start = 1000 * dice.randrange(1, 5)
    more = tuple(replace(one, offset=start + number) for number in range(len(history.faults) + 1))
    return replace(history, outcomes=(*history.outcomes, *more))


def invents_an_outcome(history: History, dice: Dice) -> History:
    one = some_visible(history, dice)
    wrong = headed(one, "source", b"in/0/%d" % dice.randrange(100, 10_000))
    return replace(history, outcomes=(*history.outcomes, replace(one, offset=1000, headers=wrong)))


def mixes_two_answers_up(history: History, dice: Dice) -> History:
    one = some_visible(history, dice)
    other = dice.choice([two for two in history.outcomes if two.value != one.value])
    mixed = [replace(two, value=other.value) if two is one else two for two in history.outcomes]
    return replace(history, outcomes=tuple(mixed))


def reorders_two_answers(history: History, dice: Dice) -> History:
    """Swap the first outcomes of two requests of one partition that lie in the same output partition."""
    first: dict[tuple[str, int, int], Logged] = {}
    for one in sorted(history.outcomes, key=lambda one: one.position):
        if one.position not in history.invisible:
            first.setdefault(source_of(one) or ("", 0, 0), one)
    lines: dict[tuple[object, ...], list[Logged]] = defaultdict(list)
    for source, one in first.items():
        lines[source[:2], one.place].append(one)
    earlier, later = sorted(dice.sample(max(lines.values(), key=len), 2), key=lambda one: one.offset)
    moved = {earlier.position: later.offset, later.position: earlier.offset}
    return replace(
        history,
        outcomes=tuple(replace(one, offset=moved.get(one.position, one.offset)) for one in history.outcomes),
        promise=replace(history.promise, ordering="partition"),
    )


def commits_ahead(history: History, dice: Dice) -> History:
    """Let a commit be seen before the outcome of the last request that it covers."""
    place, mark = next((place, mark) for place, mark in history.samples[-1].committed.items() if mark)
    source = (*place, mark - 1)
    first = min(
        one.offset for one in history.outcomes if source_of(one) == source and one.position not in history.invisible
    )
    early = Sample({place: mark}, {**history.samples[-1].ends, ("out", 0): first, ("out", 1): first})
    return replace(history, samples=(early, *history.samples[-1:]))


def moves_a_commit_back(history: History, dice: Dice) -> History:
    last = history.samples[-1]
    back = Sample({place: max(mark - dice.randrange(1, 3), 0) for place, mark in last.committed.items()}, last.ends)
    return replace(history, samples=(*history.samples, back))


def leaves_a_lag(history: History, dice: Dice) -> History:
    place = dice.choice(list(history.committed))
    return replace(history, committed={**history.committed, place: history.committed[place] - 1})


def hides_a_committed_outcome(history: History, dice: Dice) -> History:
    gone = source_of(some_visible(history, dice))
    hidden = {one.position for one in history.outcomes if source_of(one) == gone}
    return replace(history, invisible=history.invisible | hidden)


def drops_the_letters_of_an_error(history: History, dice: Dice) -> History:
    one = dice.choice([one for one in history.outcomes if has_letter(one) and one.position not in history.invisible])
    return replace(history, letters=tuple(two for two in history.letters if two.key != one.key))


def spoils_a_letter(history: History, dice: Dice) -> History:
    one = dice.choice([one for one in history.letters if one.position not in history.invisible])
    spoiled = replace(one, value=(one.value or b"") + b"!")
    return replace(history, letters=tuple(spoiled if two is one else two for two in history.letters))


def miscounts(history: History, dice: Dice) -> History:
    counters = dict(history.workers[0].counters or {})
    name = dice.choice(sorted(counters))
    counters[name] += dice.choice([-1, 1, 7])
    return replace(history, workers=(replace(history.workers[0], counters=counters),))


def loses_a_request(history: History, dice: Dice) -> History:
    return replace(history, journal={**history.journal, b"gone-%d" % dice.randrange(9): Fate.ACKED})


DAMAGES: list[tuple[str, Damage]] = [
    ("V1", loses_an_outcome),
    ("V2", repeats_an_outcome),
    ("V3", invents_an_outcome),
    ("V4", mixes_two_answers_up),
    ("V5", reorders_two_answers),
    ("V6", commits_ahead),
    ("V6", moves_a_commit_back),
    ("V7", leaves_a_lag),
    ("V8", hides_a_committed_outcome),
    ("V9", drops_the_letters_of_an_error),
    ("V9", spoils_a_letter),
    ("V13", miscounts),
    ("V15", loses_a_request),
]


def test_the_damages_find_something_to_damage() -> None:
    """The property above may skip a history; it must not skip them all."""
    histories = [Writer(Dice(seed), Promise("exactly_once")).write() for seed in range(20)]
    for _, damage in DAMAGES:
        done = 0
        for number, history in enumerate(histories):
            try:
                damage(history, Dice(number))
            except (IndexError, ValueError):
                continue
            done += 1
        assert done > len(histories) // 2, damage.__name__


def test_an_error_is_told_from_a_result() -> None:
    assert [is_error(one) for one in small().outcomes] == [False, False, True, True, False]
