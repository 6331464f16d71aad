"""The corridor with preparers before its batcher: what is being prepared counts, waits, expires and is given back."""

from __future__ import annotations

from math import prod
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from forebay.breaker import Breakers
from forebay.inference.messages import Done, Mistake, Part, Placed, Ready, Run, Spec, Start, encode
from forebay.inference.pool import Limits, Pool
from forebay.inference.preparers import Preparers
from forebay.inference.replicas import Replica, State
from forebay.inference.staging import SlotSize, Staging
from forebay.records import Partition
from tests.unit.fakes import SIZE, FakeReplica
from tests.unit.test_worker import VECTOR, Scene
from tests.unit.test_worker_faults import Corridor

P0 = Partition("requests", 0)
ROOMY = SlotSize(1 << 16, 1 << 17)
DOUBLED = Spec("two", "FP32", [-1, 2, 4])


class FakePreparer(FakeReplica):
    """A far end that gives every row twice; what it holds back is still being prepared."""

    def __init__(self, staging: Staging) -> None:
        super().__init__()
        self._staging = staging
        self.seconds = 0.001

    def get_ready(self, taken: Spec = VECTOR) -> None:
        self.say(Ready([taken], [DOUBLED], True, "cpu", 0.1, 0.1, [], []))

    def finish(self, **changes: Any) -> None:
        self.prepare()

    def prepare(self, *bad: int, cost: float = 0.0, unsound: str = "") -> None:
        """Answer the oldest job; the requests at `bad` are errors."""
        job: Run = self.jobs.popleft()
        done = Done(job.number, [], [], 0.0, 0.0, 0.001, job.requests, {}, unsound=unsound)
        slot = job.slot * ROOMY.total
        taken, position = job.inputs[0].offset, ROOMY.inputs
        for index, (shape,) in enumerate(job.shapes):
            size = 4 * prod(shape)
            raw = self._staging.map[slot + taken : slot + taken + size]
            twice = b"".join(raw[at : at + 16] * 2 for at in range(0, size, 16))
            taken += size
            done.seconds.append(self.seconds)
            done.costs.append(cost)
            if index in bad:
                done.mistakes.append(Mistake(index, "model_error", "prepare: ValueError: no"))
                continue
            self._staging.map[slot + position : slot + position + len(twice)] = twice
            done.parts.append(Part([index], [Placed(position, len(twice), [shape[0], 2, 4])]))
            position += len(twice)
        self.answers.append(encode(done))


class FakePrepared(FakeReplica):
    """A replica of a model that is prepared for before batching."""

    def get_ready(self, taken: Spec = VECTOR) -> None:
        outputs = [Spec("y", "FP32", [-1])]
        self.say(Ready([taken], outputs, True, "cpu", 0.1, 0.1, [], [], [DOUBLED]))


class PreparingScene(Scene):
    """A worker whose replica and preparer are the test's."""

    def __init__(self, partitions: int = 1, *, max_attempts: int = 3, **values: Any) -> None:
        super().__init__(partitions, max_attempts=max_attempts, **values)
        worker, limits = self.worker, Limits(30.0, 60.0, max_attempts, 5)
        self.replica = FakePrepared()
        limit = self.settings.batch.max_batch_size
        start = Start("model", "1", "f", None, None, {}, "cpu", "fp32", None, limit, SIZE.total, SIZE.inputs, 2, [])
        self.pool = Pool([Replica("r", start, self.replica, Staging(SIZE, 2))], limits)
        worker._pool = worker._rooms.pool = worker._observer._pool = self.pool
        staging = Staging(ROOMY, 2)
        self.preparer = FakePreparer(staging)
        self.preparing = Pool([Replica("p", start, self.preparer, staging)], limits, kind="preparer")
        self.preparers = worker._preparers = Preparers(self.preparing, 1.0, breakers=Breakers(enabled=True))
        worker._rooms.preparers = worker._observer._preparers = self.preparers

    def join(self) -> Scene:
        self.preparing.launch(self.clock())
        self.preparer.get_ready()
        self.preparers.collect(self.clock())
        return super().join()

    def held(self) -> list[str]:
        return sorted(one.id for one in self.preparers)

    def metric(self, name: str) -> float | None:
        self.turn(40)  # the gauges are refreshed now and then
        return self.worker._observer._metrics.registry.get_sample_value(f"forebay_{name}")


def joined(**values: Any) -> PreparingScene:
    scene = PreparingScene(**values)
    scene.join()
    return scene


def test_a_request_is_prepared_before_it_is_batched_and_staged_as_it_was_prepared() -> None:
    scene = joined()
    scene.publish("a")
    scene.turn(2)
    assert (len(scene.preparer.jobs), len(scene.replica.jobs)) == (1, 0)
    scene.preparer.prepare()
    scene.turn(2)
    [job] = scene.replica.jobs
    assert [place.dims for place in job.inputs] == [[1, 2, 4]]
    assert job.shapes == []  # nothing is left to prepare
    scene.finish()
    assert scene.answered == ["a"]
    assert scene.committed == {P0: 1}


def test_what_prepare_raises_is_answered_at_once_with_a_dead_letter() -> None:
    scene = joined()
    scene.publish("bad")
    scene.turn(2)
    scene.preparer.prepare(0)
    scene.turn(3)
    assert scene.answered == ["bad"]
    [letter] = scene.broker.records("dead")
    assert dict(letter.headers)["forebay-error-code"] == b"model_error"
    assert not scene.replica.jobs


def test_what_prepare_makes_too_large_is_that_requests_error() -> None:
    scene = joined(batch__max_batch_bytes=1024)
    scene.publish("fits", rows=1)
    scene.publish("grows", rows=40)  # 640 bytes as it comes, 1,280 prepared
    scene.publish("huge", rows=65)
    scene.turn(2)
    assert scene.answered == ["huge"]
    for _ in range(2):
        while scene.preparer.jobs:
            scene.preparer.prepare()
        scene.turn(2)
    assert scene.answered == ["huge", "grows"]
    messages = [dict(letter.headers)["kafka_dlt-exception-message"] for letter in scene.broker.records("dead")]
    assert messages[1] == b"prepare: what it made has 1280 bytes, batch.max_batch_bytes is 1024"
    assert len(scene.replica.jobs) == 1


def test_a_cost_that_prepare_says_bounds_the_batch() -> None:
    scene = joined(batch__max_batch_cost=10)
    scene.publish("warm")
    scene.turn(2)
    scene.preparer.prepare()
    scene.turn(2)
    scene.publish(*"abcd")
    scene.turn(2)
    while scene.preparer.jobs:
        scene.preparer.prepare(cost=5.0)
        scene.turn(2)
    sizes = [scene.replica.jobs[0].requests]
    scene.finish()
    while scene.replica.jobs:
        sizes.append(scene.replica.jobs[0].requests)
        scene.finish()
    assert sizes[0] == 1
    assert sum(sizes) == 5
    assert max(sizes) == 2


def test_no_more_is_read_than_the_queue_holds_with_what_is_being_prepared() -> None:
    scene = joined(batch__max_queue_size=5)
    scene.publish(*[str(n) for n in range(12)])
    scene.turn(10)
    assert len(scene.held()) == 5
    assert scene.worker._room() == 0
    assert scene.metric("preparing_requests") == 5
    queued, running = scene.metric("queue_requests"), scene.metric("in_flight_requests")
    assert queued is not None
    assert running is not None
    assert queued + running == 5


def test_a_deadline_passes_while_a_request_waits_for_its_preparation() -> None:
    scene = joined()
    scene.publish("x")
    scene.turn(2)
    scene.publish("y")
    scene.turn(2)  # both slots are taken
    scene.publish("late", timeout_ms=100)
    scene.turn(30)
    assert scene.answered == ["late"]
    assert scene.broker.records("dead") == []


def test_a_killer_of_preparers_is_poisoned_and_reading_goes_on() -> None:
    scene = joined(max_attempts=2)
    scene.publish("killer")
    scene.turn(2)
    for _ in range(2):
        scene.preparer.die()
        scene.turn(200)
        scene.preparer.get_ready()
        scene.turn(2)
    assert scene.answered == ["killer"]
    [letter] = scene.broker.records("dead")
    headers = dict(letter.headers)
    assert (headers["forebay-error-code"], headers["forebay-attempts"]) == (b"poisoned", b"2")
    assert b"preparer" in (headers["kafka_dlt-exception-message"] or b"")
    assert scene.metric("preparer_restarts_total") == 2
    assert scene.metric("replica_restarts_total") == 0


def test_readiness_says_that_no_preparer_is_there() -> None:
    scene = joined()
    assert scene.health.ready() == {}
    scene.preparer.die()
    scene.turn(3)
    assert scene.health.ready() == {"preparers of model": "no preparer is ready"}
    scene.preparer.get_ready()
    scene.turn(3)
    assert scene.health.ready() == {}


def test_a_model_that_cannot_prepare_its_example_empties_no_topic_into_the_dead_letters() -> None:
    scene = joined(delivery__drain_timeout_ms=60_000)
    scene.publish("a")
    scene.turn(2)
    scene.preparer.prepare(0, unsound="the vocabulary is gone")
    scene.turn(2)
    assert scene.answered == []
    assert scene.broker.records("dead") == []
    [(name, told)] = scene.health.ready().items()
    assert name == "breaker model (prepare)"
    assert "the vocabulary is gone" in told
    scene.worker._drain()  # ends at once: nothing but the broken model holds it up
    assert scene.clock() < 1_050
    scene.turn(100)
    scene.preparer.prepare()
    scene.turn(2)
    scene.finish()
    assert scene.answered == ["a"]
    assert "breaker model (prepare)" not in scene.health.ready()


def test_what_is_being_prepared_is_given_back_when_its_partition_is_revoked() -> None:
    scene = joined(partitions=2)
    scene.publish("a", "b", partition=0)
    scene.publish("c", partition=1)
    scene.turn(2)
    scene.consumer.revoke([P0])
    scene.turn()
    assert scene.held() == ["c"]
    assert scene.worker._custody.requests == 1
    while scene.preparer.jobs:
        scene.preparer.prepare()
        scene.turn(2)
    while scene.replica.jobs:
        scene.finish()
    assert scene.answered == ["c"]
    assert scene.worker._custody.requests == 0
    assert scene.worker._custody.bytes == 0


def test_what_is_being_prepared_below_an_answered_request_is_finished_before_its_partition_goes() -> None:
    """No watermark passes it, so what overtook it would be answered twice."""
    scene = joined(partitions=2, delivery__revoke_timeout_ms=60_000, delivery__drain_timeout_ms=60_000)
    scene.preparer.seconds = 1.0  # so each goes out alone
    for name in ("x", "y"):
        scene.publish(name, partition=1)
        scene.turn(2)
    scene.publish("overtaken")
    scene.publish("urgent", priority=1)
    scene.turn(2)
    for _ in range(3):
        scene.preparer.prepare()
        scene.turn(2)
    while "urgent" not in scene.answered:
        scene.finish()
    assert scene.held() == ["overtaken"]
    scene.preparer.answers_after = scene.replica.answers_after = 1
    scene.consumer.revoke([P0])
    scene.turn()
    assert "overtaken" in scene.answered
    assert scene.committed[P0] == 2


class PreparingCorridor(Corridor):
    """The corridor under any order of events, with a preparer that dies, hangs and refuses among them."""

    scene: PreparingScene
    make_scene = PreparingScene

    def __init__(self) -> None:
        super().__init__()
        self.preparer = self.scene.preparer
        self.is_ending = False

    @precondition(lambda self: self.preparer.jobs and self.preparer.alive)
    @rule(bad=st.sets(st.integers(0, 3), max_size=2), is_broken=st.booleans())
    def prepare(self, bad: set[int], is_broken: bool) -> None:
        all_of_them = range(self.preparer.jobs[0].requests)
        if is_broken:
            self.preparer.prepare(*all_of_them, unsound="it is broken")
        else:
            self.preparer.prepare(*bad)
        self.scene.turn()

    @precondition(lambda self: self.preparer.alive and self.scene.preparing._stillborn < 4)
    @rule()
    def a_preparer_dies(self) -> None:
        if self.scene.preparing._replicas[0].state is State.READY:
            self.preparer.die()

    @rule()
    def get_ready(self) -> None:
        super().get_ready()
        if self.preparer.alive and self.scene.preparing._replicas[0].state is State.STARTING:
            self.preparer.get_ready()
        while self.is_ending and self.preparer.alive and self.preparer.jobs:
            self.preparer.prepare()

    def teardown(self) -> None:
        self.is_ending = True
        super().teardown()


TestPreparingCorridor = PreparingCorridor.TestCase
TestPreparingCorridor.settings = settings(max_examples=20, stateful_step_count=25)
