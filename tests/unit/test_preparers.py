"""The preparers without processes: what waits and in which order, what comes back, and what becomes of a dead one's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from forebay.breaker import FIRST_PAUSE, Breakers
from forebay.errors import DeviceLostError
from forebay.inference.messages import Done, Mistake, Part, Placed, Ready, Spec, Start, encode
from forebay.inference.pool import Limits, Pool
from forebay.inference.preparers import MOST_REQUESTS, TARGET_SECONDS, Prepared, Preparers
from forebay.inference.replicas import Replica
from forebay.inference.staging import SlotSize, Staging
from forebay.records import Code, Request
from tests.unit.builders import request
from tests.unit.fakes import FakeReplica

SIZE = SlotSize(1 << 16, 1 << 16)
IDS, WORDS = Spec("ids", "INT32", [-1, -1], 0), Spec("words", "BYTES", [-1])


class FakePreparer(FakeReplica):
    """A far end whose `prepare` makes as many numbers as the first word of a request says, and one word."""

    def __init__(self, staging: Staging) -> None:
        super().__init__()
        self.staging = staging

    def get_ready(self, taken: Spec = WORDS) -> None:
        self.say(Ready([taken], [IDS, WORDS], True, "cpu", 0.1, 0.1, [], []))

    def prepare(self, *numbers: int, seconds: float = 0.001, costs: tuple[float, ...] = (), **odd: Any) -> None:
        """Answer the oldest job: `numbers` ids for each of its requests, 2 unless said; 0 and less is an error."""
        job = self.jobs.popleft()
        left = set(odd.get("left", ()))
        done = Done(job.number, [], [], 0.0, 0.0, 0.001, job.requests, {"resident": 7}, sorted(left))
        done.unsound = odd.get("unsound", "")
        start, position = job.slot * SIZE.total, SIZE.inputs
        for index in range(job.requests):
            many = numbers[index] if index < len(numbers) else 2
            done.seconds.append(seconds)
            done.costs.append(costs[index] if index < len(costs) else 0.0)
            if many <= 0:
                done.mistakes.append(Mistake(index, "model_error", "prepare: ValueError"))
            elif index not in left:
                raw = struct.pack(f"<{many}i", *range(many)) + b"\2\0\0\0hi"
                self.staging.map[start + position : start + position + len(raw)] = raw
                ids, word = Placed(position, 4 * many, [1, many]), Placed(position + 4 * many, 6, [1])
                done.parts.append(Part([index], [ids, word]))
                position += len(raw)
        self.answers.append(encode(done))


class Scene:
    """Preparers that are fakes, and their time."""

    def __init__(self, number: int = 1, *, max_attempts: int = 3, max_restarts: int = 5) -> None:
        start = Start("model", "1", "f", None, None, {}, "cpu", "fp32", None, 8, SIZE.total, SIZE.inputs, 2, [])
        stagings = [Staging(SIZE, 2) for _ in range(number)]
        self.fakes = [FakePreparer(staging) for staging in stagings]
        made = [Replica(f"p{n}", start, fake, stagings[n]) for n, fake in enumerate(self.fakes)]
        limits = Limits(30.0, 60.0, max_attempts, max_restarts)
        numbers = count(1)
        pool = Pool(made, limits, numbers, kind="preparer")
        self.preparers = Preparers(pool, 1.0, numbers, Breakers(enabled=True))
        self.now = 0.0
        self.preparers.pool.launch(self.now)
        for fake in self.fakes:
            fake.get_ready()
        self.collect()

    @property
    def fake(self) -> FakePreparer:
        return self.fakes[0]

    def add(self, *names: str, **options: Any) -> list[Request]:
        made = [line(name, **{"arrived": self.now, **options}) for name in names]
        for one in made:
            self.preparers.add(one)
        return made

    def collect(self, seconds: float = 0.0, *, hold: bool = False) -> Prepared:
        self.now += seconds
        return self.preparers.collect(self.now, hold=hold)

    def sent(self) -> list[list[str]]:
        """The ids of every job that a preparer has, in order."""
        return [
            [one.id for one in batch.requests]
            for replica in self.preparers.pool._replicas
            for batch, _ in replica.running
        ]

    def know(self, seconds: float) -> None:
        """Let it be known what a request takes."""
        self.add("known")
        self.collect()
        self.fake.prepare(seconds=seconds)
        self.collect()

    def run_until_quiet(self, kills: Callable[[list[str]], bool] = lambda _: False) -> Prepared:
        """Play every preparer; it dies on jobs that `kills` picks."""
        whole = Prepared()
        for _ in range(1_000):
            for fake, replica in zip(self.fakes, self.preparers.pool._replicas, strict=True):
                if fake.alive and replica.state.value == "starting":
                    fake.get_ready()
                elif fake.alive and fake.jobs:
                    if kills([one.id for one in replica.running[0][0].requests]):
                        fake.die()
                    else:
                        fake.prepare()
            back = self.collect(1.0)
            whole.ready += back.ready
            whole.failed += back.failed
            if not self.preparers.requests:
                return whole
        raise AssertionError("the preparers never came to rest")


def line(name: str, text: bytes = b"words", **options: Any) -> Request:
    return request(name, tensors=[[text]], shapes=[(1,)], lane="model", **options)


def ids(requests: list[Request]) -> list[str]:
    return [one.id for one in requests]


# ---------------------------------------------------------------------- the plain way


def test_a_request_comes_back_with_what_it_was_prepared_to() -> None:
    scene = Scene()
    [before] = scene.add("a", deadline=99.0, priority=2)
    scene.collect()
    scene.fake.prepare(3, seconds=0.25, costs=(4.5,))
    back = scene.collect()
    [after] = back.ready
    assert after.tensors == [struct.pack("<3i", 0, 1, 2), [b"hi"]]
    assert after.shapes == ((1, 3), (1,))
    assert after.item_bytes == 12 + 6
    assert after.cost == 4.5
    assert (after.id, after.record, after.deadline, after.priority) == ("a", before.record, 99.0, 2)
    assert back.seconds == {"model": [0.25]}
    assert scene.preparers.requests == 0


def test_requests_that_may_be_padded_together_share_a_lane_whatever_their_lengths() -> None:
    scene = Scene()
    scene.add("a", "b")
    scene.collect()
    scene.fake.prepare(3)
    scene.fake.prepare(5)
    first, second = scene.collect().ready
    assert first.lane == second.lane
    assert first.shapes != second.shapes


def test_what_prepare_refuses_fails_alone() -> None:
    scene = Scene()
    scene.know(TARGET_SECONDS / 4)
    scene.add("a", "bad", "c")
    scene.collect()
    scene.fake.prepare(2, 0, 2)
    back = scene.collect()
    assert ids(back.ready) == ["a", "c"]
    assert [(one.id, failure.code) for one, failure in back.failed] == [("bad", Code.MODEL_ERROR)]


def test_costs_stay_with_their_requests() -> None:
    scene = Scene()
    scene.know(TARGET_SECONDS / 4)
    scene.add("a", "bad", "c")
    scene.collect()
    scene.fake.prepare(2, 0, 2, costs=(1.5, 0.0, 2.5))
    assert {one.id: one.cost for one in scene.collect().ready} == {"a": 1.5, "c": 2.5}


def test_slow_requests_go_out_one_by_one_and_quick_ones_together() -> None:
    scene = Scene()
    scene.know(1.0)
    scene.add("a", "b", "c")
    scene.collect()
    assert scene.sent() == [["a"], ["b"]]
    quick = Scene()
    for _ in range(40):
        quick.know(TARGET_SECONDS / 1000)
    quick.add(*map(str, range(200)))
    quick.collect()
    assert list(map(len, quick.sent())) == [MOST_REQUESTS, MOST_REQUESTS]
    assert quick.preparers.waiting == 200 - 2 * MOST_REQUESTS


def test_large_requests_are_never_sent_in_one_message() -> None:
    scene = Scene()
    scene.know(TARGET_SECONDS / 1000)
    large = [line(name) for name in "abc"]
    for one in large:
        one.item_bytes = 3 * 2**20  # what a decoder would say of larger ones
        scene.preparers.add(one)
    scene.collect()
    assert scene.sent() == [["a"], ["b"]]


def test_urgent_requests_go_first_but_not_for_ever() -> None:
    scene = Scene()
    scene.know(1.0)
    scene.add("x")
    scene.collect()
    scene.add("y")
    scene.collect()  # both slots are taken
    scene.add("old", arrived=0.0)
    scene.add("late", "later", arrived=1.0)
    scene.add("urgent", priority=1, arrived=2.0)
    scene.add("outlived", priority=1, arrived=5.0)
    order = []
    while scene.preparers.requests:
        scene.fake.prepare(seconds=1.0)
        order += ids(scene.collect().ready)
    assert order == ["x", "y", "urgent", "old", "late", "later", "outlived"]


def test_every_preparer_gets_work() -> None:
    scene = Scene(2)
    scene.add("a", "b")
    scene.collect()
    assert [len(fake.jobs) for fake in scene.fakes] == [1, 1]


def test_nothing_goes_out_while_enough_is_prepared() -> None:
    scene = Scene()
    scene.add("a")
    scene.collect(hold=True)
    assert (scene.sent(), scene.preparers.waiting) == ([], 1)
    scene.collect()
    assert scene.sent() == [["a"]]


def test_what_a_full_slot_left_is_prepared_again() -> None:
    scene = Scene()
    scene.know(TARGET_SECONDS / 4)
    scene.add("a", "b")
    scene.collect()
    scene.fake.prepare(left=[1])
    assert ids(scene.collect().ready) == ["a"]
    scene.fake.prepare()
    assert ids(scene.collect().ready) == ["b"]


# ---------------------------------------------------------------------- deadlines


def test_a_deadline_that_passes_while_a_request_waits_is_its_error_at_once() -> None:
    scene = Scene()
    scene.know(1.0)
    scene.add("x", "y")
    scene.collect()
    scene.add("soon", deadline=5.0)
    scene.add("later", deadline=50.0)
    scene.add("never")
    assert scene.collect(4.9).failed == []
    assert [(one.id, failure.code) for one, failure in scene.collect(0.1).failed] == [("soon", Code.DEADLINE_EXCEEDED)]
    assert [one.id for one, _ in scene.collect(20.0).failed] == []
    scene.fake.prepare(seconds=1.0)
    scene.collect()
    assert scene.sent() == [["y"], ["later"]]


def test_deadlines_are_kept_while_nothing_may_go_out() -> None:
    scene = Scene()
    scene.add("a", deadline=1.0)
    back = scene.collect(1.0, hold=True)
    assert [one.id for one, _ in back.failed] == ["a"]
    assert scene.preparers.requests == 0


# ---------------------------------------------------------------------- deaths


@pytest.mark.parametrize("number", [1, 3])
def test_a_killer_is_poisoned_and_its_neighbours_are_not(number: int) -> None:
    scene = Scene(number)
    scene.know(TARGET_SECONDS / 8)
    names = [f"r{n}" for n in range(30)]
    scene.add(*names)
    back = scene.run_until_quiet(lambda held: "r11" in held)
    assert sorted(ids(back.ready)) == sorted(set(names) - {"r11"})
    [(guilty, failure)] = back.failed
    assert (guilty.id, failure.code, guilty.attempts) == ("r11", Code.POISONED, 3)
    assert failure.message == "it brought its preparer down 3 times; the last: it was ended by signal 9"
    assert scene.preparers.pool.restarts == 3


def test_a_preparer_that_hangs_is_replaced() -> None:
    scene = Scene()
    scene.add("a")
    scene.collect()
    assert ids(scene.collect(31.0).ready) == []
    scene.collect()
    assert scene.fake.launches == 2
    assert [notice.event for notice in scene.preparers.pool.notices] == ["preparer_ready", "preparer_lost"]
    assert ids(scene.run_until_quiet().ready) == ["a"]


def test_preparers_that_keep_dying_end_the_worker() -> None:
    scene = Scene(max_restarts=2, max_attempts=99)
    scene.add("a")
    with pytest.raises(DeviceLostError, match="preparers died 3 times"):
        scene.run_until_quiet(lambda _: True)


def test_a_model_that_cannot_prepare_its_own_example_fails_nobody_and_is_tried_now_and_then() -> None:
    scene = Scene()
    scene.know(TARGET_SECONDS / 2)
    for number, name in enumerate("abcde"):
        scene.add(name, arrived=number / 1000)
    scene.collect()
    assert scene.sent() == [["a", "b"], ["c", "d"]]
    for _ in range(2):
        scene.fake.prepare(0, 0, unsound="it fails")
    back = scene.collect()
    assert (back.ready, back.failed, scene.sent()) == ([], [], [])
    assert scene.preparers.stuck == scene.preparers.requests == 5
    assert [change.state for change in scene.preparers.breakers.changes] == ["opened"]
    scene.collect(FIRST_PAUSE)
    assert scene.sent() == [["a", "b"]]
    scene.fake.prepare(seconds=TARGET_SECONDS / 2)
    back = scene.collect()
    assert ids(back.ready) == ["a", "b"]
    assert scene.preparers.stuck == 0
    assert ids(scene.run_until_quiet().ready) == ["c", "d", "e"]


# ---------------------------------------------------------------------- given up


def having(*names: str) -> Callable[[Request], bool]:
    return lambda one: one.id in names


def test_requests_of_a_revoked_partition_are_given_back_from_wherever_they_are() -> None:
    scene = Scene()
    scene.add("running", "staged")
    scene.collect()
    scene.add("waits", "stays")
    assert sorted(one.id for one in scene.preparers) == ["running", "staged", "stays", "waits"]
    gone = scene.preparers.drop(having("running", "staged", "waits"))
    assert sorted(ids(gone)) == ["running", "staged", "waits"]
    assert [one.id for one in scene.preparers] == ["stays"]
    assert scene.preparers.drop(having("running", "staged", "waits")) == []
    back = scene.run_until_quiet()
    assert ids(back.ready) == ["stays"]
    assert back.failed == []


def test_what_was_given_back_does_not_come_again_from_a_dead_preparer() -> None:
    scene = Scene(max_attempts=1)
    scene.add("a", "b")
    scene.collect()
    scene.preparers.drop(having("a", "b"))
    scene.fake.die()
    back = scene.run_until_quiet()
    assert (back.ready, back.failed) == ([], [])


def test_suspects_are_given_back_too() -> None:
    scene = Scene()
    scene.add("a")
    scene.collect()
    scene.fake.die()
    scene.collect()
    assert ids(scene.preparers.drop(having("a"))) == ["a"]
    assert scene.preparers.requests == 0


def test_the_memory_of_a_preparer_is_known() -> None:
    scene = Scene()
    scene.know(0.001)
    assert scene.preparers.pool.memory() == {"p0": {"resident": 7}}
