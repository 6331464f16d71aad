"""A worker whose loop turns while nothing moves is not live; one that waits for its brokers is."""

from __future__ import annotations

from typing import Any

import confluent_kafka as ck
import pytest

from forebay.inference.replicas import Replica
from forebay.standstill import ASK_AFTER_SECONDS, STUCK_AFTER_SECONDS
from forebay.stream.leaders import are_well
from tests.unit.test_worker import Scene


def stuck(**values: Any) -> Scene:
    """A worker whose one outcome is never acknowledged."""
    scene = Scene(**values).join()
    scene.publish("a")
    scene.turn(2)
    scene.producer.hold_reports = True
    scene.finish()
    assert scene.worker._outbox.unacknowledged == 1
    return scene


def wait(scene: Scene, seconds: float) -> None:
    for _ in range(int(seconds)):
        scene.turn(1, seconds=1.0)


def test_outcomes_that_brokers_which_are_well_never_acknowledge_mean_that_the_worker_is_not_live() -> None:
    scene = stuck()
    wait(scene, STUCK_AFTER_SECONDS - 10)
    assert scene.health.live() == {}
    wait(scene, 15)
    assert "1 outcomes were not acknowledged" in scene.health.live()["delivery"]
    assert "delivery" in scene.health.ready()
    scene.producer.hold_reports = False
    wait(scene, 2)
    assert scene.health.live() == {}
    assert scene.answered == ["a"]


def test_an_outage_however_long_is_no_standstill() -> None:
    scene = stuck()
    scene.consumer.reachable = False
    wait(scene, 5 * STUCK_AFTER_SECONDS)
    assert scene.health.live() == {}
    scene.consumer.reachable = True
    wait(scene, STUCK_AFTER_SECONDS - ASK_AFTER_SECONDS)
    assert scene.health.live() == {}  # brokers that are back are given time
    wait(scene, 2 * ASK_AFTER_SECONDS)
    assert "delivery" in scene.health.live()


def test_what_brokers_refuse_is_no_standstill_but_makes_the_worker_not_ready() -> None:
    scene = Scene().join()
    scene.broker.fail_next("results", ck.KafkaError.NOT_ENOUGH_REPLICAS, 10_000)
    scene.publish("a")
    scene.turn(2)
    scene.finish()
    reasons: set[str] = set()
    for _ in range(int(2 * STUCK_AFTER_SECONDS)):
        wait(scene, 1)
        reasons |= scene.health.ready().keys()
        assert scene.health.live() == {}
    assert reasons == {"delivery"}


def test_a_worker_without_anything_to_acknowledge_is_live_for_ever() -> None:
    scene = Scene().join()
    scene.consumer.reachable = False
    wait(scene, 3 * STUCK_AFTER_SECONDS)
    assert scene.health.live() == {}


def test_a_process_that_was_frozen_for_long_has_not_been_waiting() -> None:
    scene = stuck()
    scene.clock.advance(10 * STUCK_AFTER_SECONDS)
    scene.turn()
    assert scene.health.live() == {}


def test_a_replica_that_runs_far_beyond_its_time_and_is_not_replaced_means_not_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene().join()
    scene.publish("a")
    scene.turn(2)
    monkeypatch.setattr(Replica, "late", lambda *_: None)
    wait(scene, 60)
    assert scene.health.live() == {}
    wait(scene, 40)
    assert "was not replaced" in scene.health.live()["replica"]


class Cluster:
    """What a client knows of one topic, and whether its leaders answer."""

    def __init__(self, leader: int = 1, isrs: int = 2, *, silent: bool = False, error: Any = None) -> None:
        partition = type("Partition", (), {"id": 0, "leader": leader, "replicas": [1, 2], "isrs": [1, 2][:isrs]})
        self._topic = type("Topic", (), {"error": error, "partitions": {0: partition}})
        self._silent = silent

    def list_topics(self, topic: str, timeout: float) -> Any:
        return type("Found", (), {"topics": {topic: self._topic}})

    def get_watermark_offsets(self, place: Any, timeout: float) -> tuple[int, int]:
        if self._silent:
            raise ck.KafkaException(ck.KafkaError(ck.KafkaError._TIMED_OUT))
        return 0, 1


@pytest.mark.parametrize(
    ("cluster", "well"),
    [
        (Cluster(), True),
        (Cluster(leader=-1), False),
        (Cluster(isrs=1), False),
        (Cluster(silent=True), False),
        (Cluster(error=ck.KafkaError(ck.KafkaError.UNKNOWN_TOPIC_OR_PART)), False),
    ],
)
def test_leaders_are_well_where_all_are_there_in_step_and_answer(cluster: Cluster, well: bool) -> None:
    assert are_well(cluster, ["results"], 1.0) is well
