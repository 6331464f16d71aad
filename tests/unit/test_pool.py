"""The pool without processes: replicas that die, hang, refuse and come back, and what becomes of their requests."""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Any

import pytest

from forebay.errors import DeviceLostError, ModelError
from forebay.inference.matching import Finished
from forebay.inference.messages import Failed, Mistake, Part, Placed, Start
from forebay.inference.pool import Limits, Pool
from forebay.inference.replicas import Replica
from forebay.inference.staging import Staging
from forebay.records import Batch, Code, Reason, Request
from tests.unit.builders import request
from tests.unit.fakes import SIZE, FakeReplica, PoolScene


class Scene(PoolScene):
    """A pool of fakes and its time."""

    def __init__(self, replicas: int = 1, *, max_attempts: int = 3, max_restarts: int = 5, ready: bool = True) -> None:
        self.fakes = [FakeReplica() for _ in range(replicas)]
        start = Start("model", "1", "f", None, None, {}, "cpu", "fp32", None, 8, SIZE.total, SIZE.inputs, 2, [])
        made = [Replica(f"r{n}", start, fake, Staging(SIZE, 2)) for n, fake in enumerate(self.fakes)]
        limits = Limits(
            execution_timeout=30.0, start_timeout=60.0, max_attempts=max_attempts, max_restarts=max_restarts
        )
        self.pool = Pool(made, limits, count(100))
        self.numbers = count(1)
        self.pool.launch(self.now)
        if ready:
            for fake in self.fakes:
                fake.get_ready()
            self.collect()

    def run_until_quiet(self, kills: Callable[[list[Request]], bool] = lambda _: False) -> dict[str, list[Any]]:
        """Play every replica; it dies on batches that `kills` picks. Returns the outcomes of each request."""
        outcomes: dict[str, list[Any]] = {}
        for _ in range(1_000):
            for fake, replica in zip(self.fakes, self.pool._replicas, strict=True):
                if fake.alive and replica.signature is not None and replica.state.value == "starting":
                    fake.get_ready()
                elif fake.alive and fake.jobs:
                    if kills(replica.running[0][0].requests):
                        fake.die()
                    else:
                        fake.finish()
            for back in self.collect(1.0):
                for one, failure in back.failures:
                    outcomes.setdefault(one.id, []).append(failure.code)
            if not self.pool.in_flight:
                return outcomes
        raise AssertionError("the pool never came to rest")


def having(*names: str) -> Callable[[list[Request]], bool]:
    return lambda requests: any(one.id in names for one in requests)


# ---------------------------------------------------------------------- the plain way


def test_a_pool_is_ready_when_every_replica_is() -> None:
    scene = Scene(2, ready=False)
    assert not scene.pool.ready
    assert scene.pool.free_at("model") is None
    scene.fakes[0].get_ready()
    scene.collect()
    assert (scene.pool.ready, scene.pool.ready_count()) == (False, 1)
    scene.fakes[1].get_ready()
    scene.collect()
    assert (scene.pool.ready, scene.pool.ready_count("model"), scene.pool.ready_count("other")) == (True, 2, 0)
    assert scene.pool.signatures["model"].inputs[0].name == "x"


def test_a_replica_takes_one_batch_to_run_and_one_to_wait() -> None:
    scene = Scene()
    assert scene.pool.free_at("model") == 0.0
    scene.submit("a")
    assert scene.pool.free_at("model") == inf
    scene.submit("b", "c")
    assert (scene.pool.free_at("model"), scene.pool.in_flight) == (None, 3)
    scene.fakes[0].finish()
    (back,) = scene.collect()
    assert [one.id for one, _ in back.failures] == ["a"]
    assert scene.pool.free_at("model") is not None


def test_a_batch_goes_to_the_replica_with_the_least_to_do() -> None:
    scene = Scene(2)
    scene.submit("a")
    scene.submit("b")
    assert [len(fake.jobs) for fake in scene.fakes] == [1, 1]


def test_results_are_matched_by_index_and_later_parts_replace_earlier_ones() -> None:
    scene = Scene()
    batch = scene.submit("a", "b", "c")
    fake, slot = scene.fakes[0], scene.fakes[0].jobs[0].slot
    staging = scene.pool._replicas[0]._staging
    start = slot * SIZE.total + SIZE.inputs
    staging.map[start : start + 16] = b"AAAABBBBCCCCbbbb"
    whole = Part([0, 1, 2], [Placed(SIZE.inputs, 12, [3])])
    again = Part([1], [Placed(SIZE.inputs + 12, 4, [1])])
    fake.finish(parts=[whole, again], mistakes=[Mistake(2, "non_finite_output", "NaN")])
    (back,) = scene.collect()
    assert back.batch is batch
    found = {members[0].id: outputs[0].content for members, outputs in back.results}
    assert found == {"a": b"AAAA", "b": b"bbbb"}
    assert [(one.id, failure.code) for one, failure in back.failures] == [("c", Code.NON_FINITE_OUTPUT)]


def test_a_request_that_the_replica_forgot_gets_an_error() -> None:
    scene = Scene()
    scene.submit("a", "b")
    scene.fakes[0].finish(mistakes=[Mistake(0, "model_error", "x")])
    (back,) = scene.collect()
    assert [(one.id, failure.code) for one, failure in back.failures] == [
        ("a", Code.MODEL_ERROR),
        ("b", Code.INTERNAL),
    ]


def test_requests_that_a_full_slot_left_run_again_before_anything_new() -> None:
    scene = Scene()
    scene.submit("a", "b", "c")
    scene.fakes[0].finish(mistakes=[Mistake(0, "model_error", "x")], left=[1, 2])
    (back,) = scene.collect()
    assert [one.id for one, _ in back.failures] == ["a"]
    assert scene.fakes[0].jobs[0].requests == 2
    assert scene.pool.in_flight == 2
    scene.fakes[0].finish()
    (back,) = scene.collect()
    assert [one.id for one, _ in back.failures] == ["b", "c"]
    assert not scene.pool.in_flight


# ---------------------------------------------------------------------- crashes


def test_after_a_crash_the_requests_of_the_batch_run_one_by_one() -> None:
    scene = Scene()
    scene.submit("a", "b", "c")
    sizes: list[int] = []

    def kills(requests: list[Request]) -> bool:
        sizes.append(len(requests))
        return len(sizes) == 1

    assert scene.run_until_quiet(kills) == {name: [Code.MODEL_ERROR] for name in "abc"}
    assert sizes == [3, 1, 1, 1]
    assert scene.pool.restarts == 1


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_only_the_request_that_brings_replicas_down_is_poisoned(max_attempts: int) -> None:
    """With one attempt allowed the whole batch was poisoned, neighbours and all."""
    scene = Scene(max_attempts=max_attempts, max_restarts=10)
    scene.submit("a", "killer", "c")
    outcomes = scene.run_until_quiet(having("killer"))
    assert outcomes == {"a": [Code.MODEL_ERROR], "c": [Code.MODEL_ERROR], "killer": [Code.POISONED]}
    assert scene.pool.restarts == max(max_attempts, 2)


def test_a_poisoned_request_says_what_happened() -> None:
    scene = Scene(max_attempts=2)
    batch = scene.submit("killer")
    found: list[Finished] = []
    while scene.pool.in_flight:
        fake = scene.fakes[0]
        if fake.jobs:
            fake.die()
        elif not found and fake.alive and not scene.pool.ready:
            fake.get_ready()
        found += scene.collect(1.0)
    (back,) = found
    assert back.failures[0][0] is batch.requests[0]
    assert "signal 9" in back.failures[0][1].message
    assert "2 times" in back.failures[0][1].message
    assert batch.requests[0].attempts == 2


def test_two_killers_in_one_batch_take_nobody_along() -> None:
    scene = Scene(max_attempts=2, max_restarts=10)
    scene.submit("a", "x", "b", "y")
    outcomes = scene.run_until_quiet(having("x", "y"))
    assert outcomes["x"] == outcomes["y"] == [Code.POISONED]
    assert outcomes["a"] == outcomes["b"] == [Code.MODEL_ERROR]


def test_the_batch_that_only_waited_runs_again_as_it_was() -> None:
    scene = Scene(max_attempts=2)
    scene.submit("killer")
    waiting = scene.submit("b", "c", "d")
    sizes: list[int] = []

    def kills(requests: list[Request]) -> bool:
        sizes.append(len(requests))
        return having("killer")(requests)

    outcomes = scene.run_until_quiet(kills)
    assert outcomes == {"killer": [Code.POISONED], **{name: [Code.MODEL_ERROR] for name in "bcd"}}
    assert sizes == [1, 1, 3]
    assert [one.attempts for one in waiting.requests] == [0, 0, 0]


def test_a_batch_that_the_replica_never_got_is_held_against_nobody() -> None:
    """The send fails where a replica died idle; a request that had used its attempts was lost for good."""
    scene = Scene(max_attempts=1)
    scene.fakes[0].hears = False
    batch = scene.submit("a", "b")
    assert scene.pool.in_flight == 2
    assert scene.run_until_quiet() == {name: [Code.MODEL_ERROR] for name in "ab"}
    assert [one.attempts for one in batch.requests] == [0, 0]


def test_a_killer_that_is_found_out_while_the_next_batch_is_sent_still_gets_its_outcome() -> None:
    scene = Scene(max_attempts=1)
    scene.submit("killer")
    scene.fakes[0].die()
    scene.submit("innocent")
    assert scene.run_until_quiet() == {"killer": [Code.POISONED], "innocent": [Code.MODEL_ERROR]}


def test_an_answer_that_was_sent_before_the_crash_counts() -> None:
    scene = Scene()
    scene.submit("a")
    scene.fakes[0].finish()
    scene.fakes[0].die()
    (back,) = scene.collect()
    assert [one.id for one, _ in back.failures] == ["a"]
    assert scene.pool.in_flight == 0


def test_while_suspects_run_nothing_new_is_taken() -> None:
    scene = Scene()
    scene.submit("a", "b")
    scene.fakes[0].die()
    scene.collect()
    scene.fakes[0].get_ready()
    scene.collect(1.0)
    assert scene.pool.free_at("model") is None
    assert scene.pool.in_flight == 2
    scene.run_until_quiet()
    assert scene.pool.free_at("model") is not None


def test_one_replica_that_dies_leaves_the_others_running() -> None:
    scene = Scene(2)
    scene.submit("a")
    scene.submit("b")
    scene.fakes[0].die()
    scene.fakes[1].finish()
    backs = scene.collect()
    assert [one.id for back in backs for one, _ in back.failures] == ["b"]
    assert scene.pool.ready_count() == 1
    assert scene.fakes[1].jobs[0].requests == 1  # the suspect, alone


# ---------------------------------------------------------------------- hangs


def test_a_batch_that_takes_too_long_brings_its_replica_down() -> None:
    scene = Scene(max_attempts=1)
    scene.submit("a")
    assert scene.collect(29.9) == []
    assert scene.pool.restarts == 0
    (back,) = scene.collect(0.2)
    assert back.failures[0][1].code is Code.POISONED
    assert "execution_timeout_ms" in back.failures[0][1].message
    assert scene.pool.restarts == 1


def test_waiting_behind_a_long_batch_is_no_hang() -> None:
    scene = Scene()
    scene.submit("a")
    scene.submit("b")
    scene.collect(20)
    scene.fakes[0].finish()
    scene.collect(5)
    assert scene.collect(29) == []
    assert scene.pool.restarts == 0


def test_a_replica_that_hangs_and_cannot_be_killed_ends_the_worker() -> None:
    scene = Scene()
    scene.fakes[0].can_be_killed = False
    scene.submit("a")
    with pytest.raises(DeviceLostError, match="cannot be replaced"):
        scene.collect(31)


# ---------------------------------------------------------------------- starts


def test_a_model_that_cannot_load_stops_the_start_with_its_sentence() -> None:
    scene = Scene(ready=False)
    scene.fakes[0].say(Failed("Classifier.load() failed: no such file"))
    with pytest.raises(ModelError, match="no such file"):
        scene.collect()


def test_a_process_that_ends_before_the_model_is_ready_stops_the_start() -> None:
    scene = Scene(ready=False)
    scene.fakes[0].die()
    with pytest.raises(ModelError, match="before the model was ready"):
        scene.collect()


def test_a_model_that_never_gets_ready_stops_the_start() -> None:
    scene = Scene(ready=False)
    scene.collect(59)
    with pytest.raises(ModelError, match="start_timeout_ms"):
        scene.collect(2)


def test_replicas_that_die_again_and_again_end_the_worker() -> None:
    scene = Scene(max_restarts=3)
    for _ in range(3):
        scene.fakes[0].die()
        scene.collect(60)
        scene.collect(60)  # started again
    scene.fakes[0].die()
    with pytest.raises(DeviceLostError, match="4 times"):
        scene.collect(60)


def test_a_replica_that_cannot_be_started_again_is_tried_later_and_so_is_what_it_held() -> None:
    """Without a free file descriptor the worker ended with an internal error."""
    scene = Scene(2, max_restarts=9)
    dying, other = scene.fakes
    scene.submit("a")
    for fake in scene.fakes:
        fake.cannot_start = OSError(errno.EMFILE, "Too many open files")
    dying.die()
    for _ in range(5):
        scene.collect(2)
    assert (dying.launches, scene.pool.ready, scene.pool.ready_count()) == (4, False, 1)  # after 0, 1, 2 and 4 seconds
    assert [one.event for one in scene.pool.notices][2:] == ["replica_lost"] * 4
    assert "Too many open files; raise the worker's limit" in str(scene.pool.notices[-1].fields["why"])
    other.finish()
    assert len(scene.collect()) == 1
    for fake in scene.fakes:
        fake.cannot_start = None
    scene.collect(30)
    dying.get_ready()
    scene.collect()
    assert scene.pool.ready


def test_a_worker_whose_replicas_cannot_be_started_any_more_ends_with_the_reason() -> None:
    scene = Scene(max_restarts=3)
    scene.fakes[0].cannot_start = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    scene.fakes[0].die()
    for _ in range(3):  # it dies, and two starts fail
        scene.collect(30)
    with pytest.raises(DeviceLostError, match=r"4 times .* temporarily unavailable; raise the limit of processes"):
        scene.collect(30)


def test_a_first_start_for_which_there_is_nothing_left_is_told_in_a_sentence() -> None:
    scene = Scene(ready=False)
    scene.pool.stop()
    scene.fakes[0].cannot_start, scene.fakes[0].alive = OSError(errno.EMFILE, "Too many open files"), False
    with pytest.raises(ModelError, match=r"it cannot be started: Too many open files; raise .*ulimit -n"):
        scene.pool.launch(0.0)


def test_a_finished_batch_forgives_the_crashes_before_it() -> None:
    scene = Scene(max_restarts=1)
    for _ in range(5):
        scene.fakes[0].die()
        scene.collect(60)
        scene.collect()
        scene.fakes[0].get_ready()
        scene.collect()
        scene.submit("a")
        scene.fakes[0].finish()
        assert len(scene.collect()) == 1
    assert scene.pool.restarts == 5


def test_the_first_restart_is_at_once_and_later_ones_wait_longer() -> None:
    scene = Scene(max_restarts=20)
    waits = []
    for _ in range(9):
        scene.fakes[0].die()
        scene.collect()
        died, launches = scene.now, scene.fakes[0].launches
        while scene.fakes[0].launches == launches:
            scene.collect(0.5)
        waits.append(scene.now - died)
    assert waits[:2] == [0.5, 1.0]
    assert waits == sorted(waits)
    assert waits[-1] == 30.0


def test_deaths_and_births_are_noted() -> None:
    scene = Scene()
    scene.fakes[0].die()
    scene.collect()
    assert [notice.event for notice in scene.pool.notices] == ["replica_ready", "replica_lost"]
    assert "signal 9" in str(scene.pool.notices[1].fields["why"])


# ---------------------------------------------------------------------- dropping and the end


def test_requests_of_a_revoked_partition_are_dropped_from_what_waits_and_not_from_what_runs() -> None:
    scene = Scene()
    scene.submit("a", "b", "c")
    scene.submit("d", "e")
    scene.fakes[0].die()
    scene.collect()
    gone = scene.pool.drop(having_id("b", "d"))
    assert sorted(one.id for one in gone) == ["b", "d"]
    assert scene.pool.in_flight == 3
    assert scene.run_until_quiet() == {name: [Code.MODEL_ERROR] for name in "ace"}
    scene.submit("running")
    assert scene.pool.drop(having_id("running")) == []


def having_id(*names: str) -> Callable[[Request], bool]:
    return lambda one: one.id in names


def test_dropping_everything_leaves_nothing_in_flight() -> None:
    scene = Scene()
    scene.submit("a", "b")
    scene.submit("c")
    scene.fakes[0].die()
    scene.collect()
    assert len(scene.pool.drop(lambda _: True)) == 3
    assert scene.pool.in_flight == 0
    scene.collect(1.0)
    scene.fakes[0].get_ready()
    scene.collect()
    assert scene.pool.free_at("model") is not None


def test_stopping_ends_every_replica() -> None:
    scene = Scene(2)
    scene.pool.stop()
    assert all(fake.stopped for fake in scene.fakes)


# ---------------------------------------------------------------------- deadlines and predictions


def test_the_pool_predicts_when_its_replica_is_free() -> None:
    scene = Scene()
    first = [request("a")]
    scene.pool.submit(Batch(1, "model", first, 1, Reason.IDLE, 0.0, expected=5.0), 1.0)
    assert scene.pool.free_at("model") == 6.0


def test_two_replicas_are_free_when_the_first_of_them_is() -> None:
    scene = Scene(replicas=2)
    for number, expected in enumerate((5.0, 2.0)):
        batch = Batch(number, "model", [request("a")], 1, Reason.IDLE, 0.0, expected=expected)
        scene.pool.submit(batch, 0.0)
    assert scene.pool.free_at("model") == 2.0


def test_a_staged_request_is_answered_at_its_deadline_and_never_again() -> None:
    """A request behind a batch of ninety seconds had its answer after it, ninety seconds late."""
    scene = Scene()
    scene.submit("long")
    staged = [request("dated", deadline=2.0), request("timeless"), request("later", deadline=9.0)]
    scene.pool.submit(Batch(2, "model", staged, 3, Reason.FULL_ROWS, 0.0, deadline=2.0), 0.0)
    assert scene.pool.expire(1.9) == []
    assert [one.id for one in scene.pool.expire(2.0)] == ["dated"]
    assert scene.pool.expire(3.0) == []
    assert [one.id for one in scene.pool.expire(9.5)] == ["later"]
    assert scene.fakes[0].skips == [(2, [0]), (2, [2])]
    assert list(scene.run_until_quiet()) == ["long", "timeless"]


def test_a_request_that_was_answered_while_it_was_staged_is_not_suspected_later() -> None:
    scene = Scene()
    scene.submit("long")
    staged = [request("dated", deadline=2.0), request("timeless")]
    scene.pool.submit(Batch(2, "model", staged, 2, Reason.FULL_ROWS, 0.0, deadline=2.0), 0.0)
    scene.pool.expire(2.0)
    scene.fakes[0].finish()
    scene.collect()
    scene.fakes[0].die()
    scene.collect()
    assert list(scene.run_until_quiet()) == ["timeless"]


def test_what_a_lost_replica_left_behind_expires_too() -> None:
    scene = Scene()
    batch = Batch(1, "model", [request("a", deadline=2.0), request("b")], 2, Reason.IDLE, 0.0, deadline=2.0)
    scene.pool.submit(batch, 0.0)
    scene.fakes[0].die()
    scene.collect()
    assert [one.id for one in scene.pool.expire(3.0)] == ["a"]
    assert list(scene.run_until_quiet()) == ["b"]
