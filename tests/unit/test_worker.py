"""The corridor, whole, on an in-memory broker: one outcome per record, and no commit above an unfinished one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest

from forebay.errors import DeviceLostError, KafkaFatalError
from forebay.health import Health
from forebay.inference.messages import Mistake, Spec, Start
from forebay.inference.pool import Limits, Pool
from forebay.inference.replicas import Replica
from forebay.inference.staging import Staging
from forebay.records import Code, Headers, Partition, Record
from forebay.settings import Settings
from forebay.stream.member import Event
from forebay.testing import ManualClock, MemoryBroker, make_worker, memory_settings
from forebay.wire import InferenceError, Result, parse_outcome
from tests.unit.builders import record, vector_request
from tests.unit.fakes import SIZE, FakeReplica

ROOT = Path(__file__).parents[2]
MODEL = {"model.factory": "tests.inference.models:Sums", "model.name": "model"}
P0, P1 = Partition("requests", 0), Partition("requests", 1)
VECTOR = Spec("x", "FP32", [-1, 4])


def settings(**values: Any) -> Settings:
    return memory_settings({**MODEL, **{key.replace("__", "."): value for key, value in values.items()}})


def memory_broker(partitions: int = 1) -> MemoryBroker:
    return MemoryBroker({"requests": partitions, "results": 1, "dead": 1, "replies": 1})


def publish(broker: MemoryBroker, name: str, start: float = 0.0, *, partition: int = 0, **options: Any) -> Record:
    more: Headers = options.pop("headers", [])
    value, headers = vector_request(start, **options)
    return broker.append("requests", value, name.encode(), [*headers, *more], partition)


def outcomes(broker: MemoryBroker, topic: str = "results") -> dict[str, Result | InferenceError]:
    """What came out, by id; an id that came out twice is an error."""
    found = [parse_outcome(one.value or b"", one.headers) for one in broker.records(topic)]
    assert len({one.id for one in found}) == len(found), "a request has two outcomes"
    return {one.id: one for one in found}


def codes(broker: MemoryBroker) -> dict[str, str]:
    return {name: one.code if isinstance(one, InferenceError) else "ok" for name, one in outcomes(broker).items()}


class Scene:
    """A worker whose replicas are the test's, turn by turn, on a clock that moves a millisecond per look."""

    def __init__(self, partitions: int = 1, *, max_attempts: int = 3, max_restarts: int = 5, **values: Any) -> None:
        self.broker = memory_broker(partitions)
        self.clock = ManualClock(step=0.001)
        self.settings = settings(**values)
        self.worker, self.consumer, self.producer = make_worker(self.broker, self.settings, ROOT, self.clock)
        self.health: Health = self.worker._health
        self.health._clock = self.clock
        self.replica = FakeReplica()
        limit = self.settings.batch.max_batch_size
        start = Start("model", "1", "f", None, None, {}, "cpu", "fp32", None, limit, SIZE.total, SIZE.inputs, 2, [])
        self.worker._pool.stop()
        pool = Pool(
            [Replica("r", start, self.replica, Staging(SIZE, 2))], Limits(30.0, 60.0, max_attempts, max_restarts)
        )
        self.worker._pool = self.worker._rooms.pool = self.worker._observer._pool = pool
        self.pool = pool

    def join(self) -> Scene:
        self.pool.launch(self.clock())
        self.replica.get_ready(VECTOR)
        self.pool.collect(self.clock())
        self.worker._join()
        self.turn()
        return self

    def turn(self, times: int = 1, seconds: float = 0.02) -> None:
        for _ in range(times):
            self.clock.advance(seconds)
            self.worker._turn()

    def publish(self, *names: str, partition: int = 0, **options: Any) -> None:
        for name in names:
            publish(self.broker, name, partition=partition, **options)

    def finish(self, **changes: Any) -> None:
        """Let the replica answer its oldest batch; every request gets an error unless `changes` says otherwise."""
        self.replica.finish(**changes)
        self.turn(2)

    @property
    def committed(self) -> dict[Partition, int]:
        return {where: mark for where, mark in self.broker.committed.items() if mark}

    @property
    def answered(self) -> list[str]:
        return [(one.key or b"").decode() for one in self.broker.records("results")]


# ---------------------------------------------------------------------- batches and their bounds


def test_what_arrives_while_the_replica_is_busy_runs_in_the_next_batch() -> None:
    scene = Scene(batch__max_batch_size=32).join()
    scene.publish("first")
    scene.turn()
    scene.publish(*[f"later-{n}" for n in range(9)])
    scene.turn(3)
    assert [job.requests for job in scene.replica.jobs] == [1]
    scene.finish()
    assert [job.requests for job in scene.replica.jobs] == [9]


def test_a_full_batch_is_staged_behind_a_busy_replica() -> None:
    scene = Scene(batch__max_batch_size=4).join()
    scene.publish(*map(str, range(10)))
    scene.turn(3)
    assert [job.requests for job in scene.replica.jobs] == [4, 4]


def test_a_deadline_that_passes_while_the_replica_is_busy_is_answered_at_once() -> None:
    scene = Scene(batch__max_batch_size=4).join()
    scene.publish("running")
    scene.turn()
    scene.publish("late", timeout_ms=500)
    scene.publish("patient")
    scene.turn()
    assert scene.answered == []
    scene.clock.advance(0.6)
    scene.turn(2)
    assert codes(scene.broker) == {"late": Code.DEADLINE_EXCEEDED}
    assert scene.broker.records("dead") == []
    scene.finish()
    scene.finish()
    assert codes(scene.broker) == {"late": "deadline_exceeded", "running": "model_error", "patient": "model_error"}


def test_a_request_that_runs_already_never_expires() -> None:
    scene = Scene().join()
    scene.publish("running", timeout_ms=500)
    scene.turn()
    scene.clock.advance(5.0)
    scene.turn()
    assert scene.answered == []
    scene.finish()
    assert codes(scene.broker) == {"running": Code.MODEL_ERROR}


def test_a_more_urgent_request_overtakes_those_that_wait() -> None:
    scene = Scene(batch__max_batch_size=1).join()
    scene.publish("a", "b", "c", "d")
    scene.publish("urgent", priority=1)
    scene.turn()
    for _ in range(5):
        scene.finish()
    assert scene.answered[:2] == ["a", "b"] or scene.answered[0] == "urgent"
    assert scene.answered.index("urgent") < scene.answered.index("c")


def test_a_request_larger_than_a_batch_may_be_is_refused() -> None:
    scene = Scene(batch__max_batch_bytes=1_024).join()
    scene.publish("large", rows=65)
    scene.publish("fits", rows=64)
    scene.turn()
    assert codes(scene.broker) == {"large": Code.TOO_LARGE}
    assert [job.rows for job in scene.replica.jobs] == [[64]]


# ---------------------------------------------------------------------- commits


def test_nothing_is_committed_before_its_outcome_is_acknowledged() -> None:
    scene = Scene().join()
    scene.producer.hold_reports = True
    scene.publish("a", "b")
    scene.turn()
    scene.finish()
    scene.turn(30)
    assert len(scene.answered) == 2
    assert scene.committed == {}
    scene.producer.hold_reports = False
    scene.turn(30)
    assert scene.committed == {P0: 2}


def test_one_outcome_that_is_not_taken_holds_the_commits_above_it() -> None:
    scene = Scene(kafka__reply_topics="replies").join()
    scene.broker.fail_next("replies", ck.KafkaError.REQUEST_TIMED_OUT, times=6)
    scene.publish("a")
    scene.publish("stuck", headers=[("kafka_replyTopic", b"replies")])
    scene.publish("c", "d")
    scene.turn()
    scene.finish()
    scene.turn(20)
    assert scene.answered == ["a", "c", "d"]
    assert scene.committed == {P0: 1}
    assert "replies" in scene.health.ready()["delivery"]
    scene.turn(400)
    assert scene.committed == {P0: 4}
    assert "delivery" not in scene.health.ready()
    assert len(scene.broker.records("replies")) == 1


def test_a_dead_letter_that_is_not_taken_holds_its_record_open() -> None:
    scene = Scene().join()
    scene.broker.fail_next("dead", ck.KafkaError.NOT_ENOUGH_REPLICAS, times=4)
    scene.broker.append("requests", b"{", b"bad")
    scene.turn(10)
    assert scene.answered == ["bad"]
    assert scene.committed == {}
    scene.turn(200)
    assert scene.committed == {P0: 1}
    assert len(scene.broker.records("dead")) == 1


def test_a_commit_that_was_refused_is_asked_for_again() -> None:
    scene = Scene().join()
    scene.broker.fail_commits.extend([ck.KafkaError.REBALANCE_IN_PROGRESS] * 3)
    scene.publish("a")
    scene.turn()
    scene.finish()
    scene.turn(60)
    assert scene.committed == {P0: 1}


def test_an_idle_worker_commits_once_and_not_again_and_again() -> None:
    scene = Scene().join()
    scene.publish("a")
    scene.turn()
    scene.finish()
    scene.turn(300)
    assert [marks for marks in scene.broker.commit_history if marks != {P0: 0}] == [{P0: 1}]


def test_records_of_partitions_that_are_not_assigned_are_dropped() -> None:
    scene = Scene().join()
    value, headers = vector_request()
    scene.worker._reception.accept([record(value, headers, partition=9)], scene.clock())
    scene.turn(3)
    assert (scene.replica.jobs, scene.answered, scene.committed) == (type(scene.replica.jobs)(), [], {})
    assert scene.worker._room() == scene.settings.batch.queue_size


# ---------------------------------------------------------------------- rebalances


def in_flight_on_both(**values: Any) -> Scene:
    """One batch with two requests of each partition runs, and one more request of each waits."""
    scene = Scene(partitions=2, batch__max_batch_size=4, **values).join()
    scene.publish("a0", "b0", partition=0)
    scene.publish("a1", "b1", partition=1)
    scene.turn()
    scene.publish("w0", partition=0)
    scene.publish("w1", partition=1)
    scene.turn()
    assert [job.requests for job in scene.replica.jobs] == [4]
    return scene


def test_what_runs_for_a_revoked_partition_is_finished_and_committed_before_it_goes() -> None:
    scene = in_flight_on_both()
    scene.replica.answers_after = 3
    scene.consumer.revoke([P0])
    scene.turn(30)
    assert {"a0", "b0"} <= set(scene.answered)
    assert scene.committed[P0] >= 2
    assert scene.committed[P1] == 3
    assert set(scene.answered) - {"w0"} == {"a0", "b0", "a1", "b1", "w1"}
    assert scene.committed[P0] == 2 + scene.answered.count("w0")


def test_what_a_revoked_partition_does_not_finish_in_time_is_given_back() -> None:
    scene = in_flight_on_both()
    scene.consumer.revoke([P0])
    scene.turn(5)
    assert scene.committed.get(P0) is None
    scene.finish()
    scene.turn(5)
    scene.finish()
    scene.turn(20)
    assert set(scene.answered) == {"a1", "b1", "w1"}
    assert scene.committed == {P1: 3}
    assert scene.worker._room() == scene.settings.batch.queue_size


def test_a_lost_partition_is_forgotten_without_a_commit() -> None:
    scene = in_flight_on_both()
    scene.consumer.lose([P0])
    scene.turn()
    scene.finish()
    scene.turn(5)
    scene.finish()
    scene.turn(20)
    assert set(scene.answered) == {"a1", "b1", "w1"}
    assert scene.committed == {P1: 3}
    assert all(marks.get(P0, 0) == 0 for marks in scene.broker.commit_history)


def test_a_partition_that_comes_back_is_read_again_and_answered_once() -> None:
    scene = in_flight_on_both()
    scene.consumer.lose([P0])
    scene.consumer.assign([P0])
    scene.turn(2)
    for _ in range(4):
        if scene.replica.jobs:
            scene.finish()
        scene.turn(3)
    scene.turn(20)
    assert Counter(scene.answered) == Counter(["a0", "b0", "w0", "a1", "b1", "w1"])
    assert scene.committed == {P0: 3, P1: 3}


def test_outcomes_on_their_way_when_a_partition_is_lost_close_nothing_afterwards() -> None:
    scene = Scene(partitions=2).join()
    scene.producer.hold_reports = True
    scene.publish("a")
    scene.turn()
    scene.finish()
    scene.consumer.lose([P0])
    scene.consumer.assign([P0])
    scene.turn(2)
    scene.producer.hold_reports = False
    scene.turn(2)
    assert scene.committed == {}
    scene.finish()
    scene.turn(20)
    assert scene.committed == {P0: 1}
    assert scene.answered == ["a", "a"]  # at least once: it was fenced


def test_a_worker_stays_live_while_it_waits_for_what_runs_of_a_revoked_partition() -> None:
    scene = in_flight_on_both(delivery__revoke_timeout_ms=60_000, delivery__drain_timeout_ms=60_000)
    scene.clock.step = 0.1
    scene.consumer.revoke([P0])
    scene.turn()
    assert scene.health.live() == {}


# ---------------------------------------------------------------------- back-pressure


def test_a_full_queue_pauses_and_half_a_queue_resumes() -> None:
    scene = Scene(batch__max_batch_size=2, batch__max_queue_size=8).join()
    scene.publish(*map(str, range(40)))
    scene.turn(3)
    assert not scene.consumer.paused  # soon there might be room again
    scene.turn(60)
    assert scene.consumer.paused
    scene.finish()
    assert scene.consumer.paused  # two places are not half of the queue
    scene.finish()
    scene.turn()
    assert not scene.consumer.paused


def test_a_paused_worker_polls_on() -> None:
    scene = Scene(batch__max_batch_size=2, batch__max_queue_size=4).join()
    scene.publish(*map(str, range(20)))
    scene.turn(70)
    assert scene.consumer.paused
    polls: list[int] = []
    receive = scene.consumer.receive
    scene.consumer.receive = lambda limit, wait: polls.append(limit) or receive(limit, wait)  # type: ignore[method-assign, func-returns-value]
    scene.turn(10)
    assert len(polls) == 10
    assert scene.health.live() == {}


def test_no_more_is_read_than_the_queue_holds() -> None:
    scene = Scene(batch__max_batch_size=2, batch__max_queue_size=8).join()
    scene.publish(*map(str, range(100)))
    for _ in range(200):
        scene.turn()
        waiting = sum(batcher.requests for batcher in scene.worker._batchers.values())
        assert waiting + scene.pool.in_flight <= 8
        if scene.replica.jobs:
            scene.finish()
    assert len(scene.answered) == 100
    assert scene.committed == {P0: 100}


def test_bytes_that_are_not_acknowledged_hold_reading_back() -> None:
    scene = Scene(batch__max_queue_bytes=1_024, batch__max_queue_size=4).join()
    scene.producer.hold_reports = True
    for number in range(50):
        scene.broker.append("requests", b"{" * 200, b"%d" % number)
    scene.turn(100)
    read = len(scene.answered)
    assert 6 <= read < 50
    scene.producer.hold_reports = False
    scene.turn(300)
    assert len(scene.answered) == 50
    assert scene.committed == {P0: 50}


# ---------------------------------------------------------------------- crashes of replicas


def test_a_crash_costs_no_outcome_and_poisons_the_killer_alone() -> None:
    scene = Scene(batch__max_batch_size=4, max_attempts=2).join()
    scene.publish("a", "killer", "c")
    scene.turn()
    for _ in range(200):
        if scene.replica.jobs and scene.replica.alive:
            (running, _), *_ = scene.pool._replicas[0].running
            if any(one.id == "killer" for one in running.requests):
                scene.replica.die()
            else:
                scene.replica.finish(parts=[], mistakes=[Mistake(0, "model_error", "fine")])
        elif scene.replica.alive and not scene.pool.ready:
            scene.replica.get_ready(VECTOR)
        scene.turn()
    assert codes(scene.broker) == {"a": "model_error", "c": "model_error", "killer": "poisoned"}
    attempts = {
        (one.key or b"").decode(): dict(one.headers)["forebay-attempts"] for one in scene.broker.records("dead")
    }
    assert attempts == {"killer": b"2", "a": b"2", "c": b"2"}
    assert scene.committed == {P0: 3}


def test_while_no_replica_is_there_the_worker_is_live_and_not_ready() -> None:
    scene = Scene().join()
    assert scene.health.ready() == {}
    scene.replica.die()
    scene.turn(2)
    assert scene.health.live() == {}
    assert "model model" in scene.health.ready()
    scene.turn(5)
    scene.replica.get_ready(VECTOR)
    scene.turn(2)
    assert scene.health.ready() == {}


def test_a_replica_that_hangs_for_good_ends_the_worker_with_nothing_committed() -> None:
    scene = Scene().join()
    scene.replica.can_be_killed = False
    scene.publish("a")
    scene.turn()
    scene.clock.advance(31)
    with pytest.raises(DeviceLostError):
        scene.turn()
    assert scene.committed == {}


# ---------------------------------------------------------------------- the end


def test_a_drain_finishes_what_was_read_commits_it_and_leaves() -> None:
    scene = Scene(batch__dispatch="static", batch__max_batch_size=8).join()
    scene.publish("a", "b", "c")
    scene.turn(3)
    assert not scene.replica.jobs  # static waits for five more
    scene.replica.answers_after = 2
    scene.worker.stop()
    scene.worker._drain()
    scene.worker._leave()
    assert sorted(scene.answered) == ["a", "b", "c"]
    assert scene.committed == {P0: 3}
    assert scene.consumer.closed
    assert scene.replica.stopped
    assert scene.health.phase == "stopped"


def test_what_arrives_during_a_drain_is_left_to_others() -> None:
    scene = Scene().join()
    scene.publish("a")
    scene.turn()
    scene.publish("b")
    scene.replica.answers_after = 20
    scene.worker.stop()
    scene.worker._drain()
    scene.worker._leave()
    assert scene.answered == ["a"]
    assert scene.committed == {P0: 1}


def test_a_drain_that_takes_too_long_gives_the_rest_back() -> None:
    scene = Scene(partitions=2, delivery__drain_timeout_ms=500).join()
    scene.publish("never")
    scene.turn()
    scene.broker.append("requests", b"{", b"bad", partition=1)
    scene.turn()
    scene.worker.stop()
    scene.worker._drain()
    scene.worker._leave()
    assert scene.answered == ["bad"]
    assert scene.committed == {P1: 1}


def test_the_phases_of_a_worker_can_be_asked_for() -> None:
    scene = Scene()
    assert scene.health.started() != {}
    scene.join()
    assert (scene.health.started(), scene.health.ready()) == ({}, {})
    scene.worker._drain()
    assert "draining" in scene.health.ready()["phase"]
    assert scene.health.live() == {}


def test_a_stop_before_the_model_is_ready_joins_nothing() -> None:
    scene = Scene()
    scene.worker.stop()
    scene.worker.run()
    assert scene.consumer.closed
    assert scene.broker.commit_history == []


def test_a_consumer_that_cannot_go_on_ends_the_worker() -> None:
    scene = Scene().join()
    scene.publish("a")
    scene.turn()
    scene.consumer.fatal = "fenced"
    with pytest.raises(KafkaFatalError, match="fenced"):
        scene.turn()
    scene.worker._leave()
    assert scene.committed == {}


def test_what_a_consumer_skips_is_counted_by_partition_and_leaves_the_worker_ready() -> None:
    scene = Scene(partitions=2).join()
    scene.consumer.events += [
        Event("FOREBAY_SKIPPED", "why", P1, 100, 60),
        Event("FOREBAY_SKIPPED", "why", P1, 110, 10),
    ]
    scene.turn()
    value = scene.worker._observer._metrics.registry.get_sample_value
    assert value("forebay_skipped_requests_total", {"topic": "requests", "partition": "1"}) == 70
    assert scene.health.ready() == {}
