"""A pool whose replicas are replaced while it works: who gets which batch, who leaves when, and what goes wrong."""

from __future__ import annotations

from itertools import count

import pytest

from forebay.inference.matching import Finished
from forebay.inference.messages import Failed, Start
from forebay.inference.pool import Limits, Pool
from forebay.inference.replicas import Replica
from forebay.inference.staging import Staging
from forebay.records import Request
from tests.unit.fakes import SIZE, FakeReplica, PoolScene

LIMITS = Limits(execution_timeout=30.0, start_timeout=60.0, max_attempts=3, max_restarts=5)


def made(fakes: list[FakeReplica], version: str) -> list[Replica]:
    start = Start("model", version, "f", None, None, {}, "cpu", "fp32", None, 8, SIZE.total, SIZE.inputs, 2, [])
    return [Replica(f"model-{n}", start, fake, Staging(SIZE, 2)) for n, fake in enumerate(fakes)]


class Scene(PoolScene):
    """A pool of version 1 that serves, and the successors that a test gives it."""

    def __init__(self, replicas: int = 1) -> None:
        self.old = [FakeReplica() for _ in range(replicas)]
        self.new: list[FakeReplica] = []
        self.pool = Pool(made(self.old, "1"), LIMITS, count(100))
        self.numbers = count(1)
        self.pool.launch(self.now)
        for fake in self.old:
            fake.get_ready()
        self.collect()

    def begin(self, replicas: int = 1, version: str = "2") -> list[FakeReplica]:
        self.new = [FakeReplica() for _ in range(replicas)]
        self.pool.succession.begin("model", made(self.new, version), self.now)
        return self.new

    def switch(self) -> None:
        for fake in self.new:
            fake.get_ready()
        self.collect()
        assert self.pool.succession.ready("model")
        self.pool.switch("model", self.now)


def versions(back: list[Finished]) -> dict[str, str]:
    """The version that answered each request."""
    return {one.id: found.signature.version for found in back for one, _ in found.failures if found.signature}


def test_a_successor_gets_no_batch_before_it_takes_over() -> None:
    scene = Scene()
    [new] = scene.begin()
    scene.submit("a")
    new.get_ready()
    scene.collect()
    scene.submit("b")
    assert scene.pool.succession.ready("model")
    assert (len(scene.old[0].jobs), len(new.jobs), scene.pool.ready_count()) == (2, 0, 1)
    assert scene.pool.free_at("model") is None


def test_successors_take_over_only_when_all_of_them_are_ready() -> None:
    scene = Scene()
    first, second = scene.begin(2)
    first.get_ready()
    scene.collect()
    assert not scene.pool.succession.ready("model")
    second.get_ready()
    scene.collect()
    assert scene.pool.succession.ready("model")


def test_old_replicas_finish_what_they_have_and_new_ones_get_what_comes() -> None:
    scene = Scene()
    [old], [new] = scene.old, scene.begin()
    scene.submit("a")
    scene.submit("b")
    scene.switch()
    assert scene.pool.free_at("model") == 0.0
    scene.submit("c")
    assert (len(old.jobs), len(new.jobs), scene.pool.in_flight) == (2, 1, 3)
    assert scene.pool.signatures["model"].version == "2"
    new.finish()
    old.finish()
    assert versions(scene.collect()) == {"a": "1", "c": "2"}
    assert not old.stopped
    old.finish()
    assert versions(scene.collect()) == {"b": "1"}
    assert old.stopped
    assert not scene.pool.succession
    assert (scene.pool.in_flight, scene.pool.ready_count(), scene.pool.restarts) == (0, 1, 0)


def test_an_old_replica_that_is_down_or_starting_just_leaves() -> None:
    scene = Scene(replicas=2)
    scene.begin()
    scene.old[0].die()
    scene.collect()
    scene.collect()
    assert scene.old[0].launches == 2
    scene.switch()
    assert [fake.stopped for fake in scene.old] == [True, True]
    assert [replica.transport for replica in scene.pool._replicas] == scene.new


def test_what_a_retired_replica_leaves_behind_runs_on_the_new_one_and_nobody_starts_it_again() -> None:
    scene = Scene()
    [old], [new] = scene.old, scene.begin()
    batch = scene.submit("a", "b")
    scene.submit("c")
    scene.switch()
    old.die()
    back = scene.collect()
    while scene.pool.in_flight:
        if new.jobs:
            new.finish()
        back += scene.collect(1.0)
    assert versions(back) == {"a": "2", "b": "2", "c": "2"}
    assert [one.attempts for one in batch.requests] == [1, 1]
    assert (old.launches, old.stopped, scene.pool.restarts) == (1, True, 1)


@pytest.mark.parametrize("how", ["says so", "dies", "hangs", "dies when it is ready"])
def test_successors_that_cannot_start_leave_and_the_old_ones_notice_nothing(how: str) -> None:
    scene = Scene()
    good, bad = scene.begin(2)
    good.get_ready()
    scene.collect()
    if how == "says so":
        bad.say(Failed("it has no weights"))
    elif how == "hangs":
        scene.now += 61
    else:
        if how == "dies when it is ready":
            bad.get_ready()
            scene.collect()
        bad.die()
    scene.collect()
    expected = {"says so": "it has no weights", "hangs": "inference.start_timeout_ms"}.get(how, "signal 9")
    assert expected in scene.pool.succession.failure("model")
    assert not scene.pool.succession.ready("model")
    assert (good.stopped, bad.stopped) == (True, True)
    scene.pool.succession.abandon("model")
    assert not scene.pool.succession
    scene.submit("a")
    scene.old[0].finish()
    assert versions(scene.collect()) == {"a": "1"}
    assert (scene.pool.restarts, scene.pool.ready_count(), len(scene.pool.notices)) == (0, 1, 1)


def test_successors_are_abandoned_at_once_and_others_may_follow() -> None:
    scene = Scene()
    [first] = scene.begin()
    scene.pool.succession.abandon("model")
    assert first.stopped
    [second] = scene.begin(version="3")
    scene.switch()
    scene.submit("a")
    second.finish()
    assert versions(scene.collect()) == {"a": "3"}


def test_the_end_of_a_pool_is_the_end_of_everybody_in_it() -> None:
    scene = Scene()
    scene.submit("a")
    scene.begin()
    scene.switch()
    [third] = scene.begin(version="3")
    scene.pool.stop()
    assert [fake.stopped for fake in (*scene.old, *scene.new, third)] == [True, True, True]


def test_recalled_replicas_end_at_once_and_their_requests_come_back() -> None:
    scene = Scene()
    batch = scene.submit("a", "b", "c")
    batch.answered.add(id(batch.requests[1]))
    scene.begin()
    scene.switch()
    assert [one.id for one in scene.pool.recall("model")] == ["a", "c"]
    assert (scene.old[0].stopped, scene.pool.in_flight, bool(scene.pool.succession)) == (True, 0, False)


def test_leftovers_that_are_held_wait_to_be_dropped_and_the_others_run() -> None:
    scene = Scene()
    [old], [new] = scene.old, scene.begin()
    scene.submit("a", "held")
    scene.submit("b", "held too")
    scene.switch()

    def is_held(one: Request) -> bool:
        return one.id.startswith("held")

    scene.pool.leftovers.held["model"] = is_held
    old.die()
    back = scene.collect()
    for _ in range(3):
        if new.jobs:
            new.finish()
        back += scene.collect()
    assert versions(back) == {"a": "2"}
    assert scene.pool.free_at("model") is None
    assert sorted(one.id for one in scene.pool.drop(is_held)) == ["held", "held too"]
    while scene.pool.in_flight:
        if new.jobs:
            new.finish()
        back += scene.collect()
    assert versions(back) == {"a": "2", "b": "2"}
    assert scene.pool.free_at("model") == 0.0
