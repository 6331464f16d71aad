"""The breaker: a broken model answers nothing, bad requests are answered, and a mended model goes on by itself."""

from __future__ import annotations

from itertools import pairwise

import pytest

from forebay.breaker import FIRST_PAUSE, LONGEST_PAUSE, Breakers
from forebay.worker import Worker
from tests.unit.test_worker import P0, Scene, codes


def after(breakers: Breakers, unsound: str, now: float, *, tells: bool = True) -> bool:
    return breakers.holds("m", unsound, tells=tells, now=now)


# ---------------------------------------------------------------------- alone


def test_a_batch_that_fails_with_its_model_is_held_and_opens_the_breaker() -> None:
    breakers = Breakers(enabled=True)
    assert not breakers
    assert breakers.lets("m", 0.0)
    assert after(breakers, "it is broken", 0.0)
    assert breakers.is_open("m")
    assert not breakers.lets("m", 0.1)
    assert breakers.lets("other", 0.1)
    assert [(change.state, change.why) for change in breakers.changes] == [("opened", "it is broken")]


def test_an_open_breaker_lets_one_batch_try_after_pauses_that_double_up_to_a_limit() -> None:
    breakers = Breakers(enabled=True)
    after(breakers, "broken", 0.0)
    now, tried_at = 0.0, []
    while len(tried_at) < 8:
        now += 0.5
        if breakers.lets("m", now):
            tried_at.append(now)
            breakers.began("m", now)
            assert not breakers.lets("m", now)
            assert after(breakers, "broken", now)
    pauses = [later - earlier for earlier, later in pairwise(tried_at)]
    assert tried_at[0] == FIRST_PAUSE
    assert pauses == [2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]


@pytest.mark.parametrize("enabled", [True, False])
def test_failures_of_a_sound_model_are_never_held(enabled: bool) -> None:
    breakers = Breakers(enabled)
    assert not any(after(breakers, "", now) for now in range(100))
    assert not breakers
    assert not breakers.changes


def test_a_breaker_that_is_off_holds_nothing() -> None:
    breakers = Breakers(enabled=False)
    assert not after(breakers, "broken", 0.0)
    assert breakers.lets("m", 0.0)


def test_the_first_batch_of_a_model_that_works_closes_its_breaker_and_no_other() -> None:
    breakers = Breakers(enabled=True)
    after(breakers, "broken", 0.0)
    breakers.holds("other", "broken", tells=True, now=0.0)
    assert not after(breakers, "", 1.0)
    assert not breakers.is_open("m")
    assert breakers.is_open("other")
    assert breakers.changes[-1].state == "closed"


def test_a_request_that_is_poisoned_says_nothing_about_the_model() -> None:
    breakers = Breakers(enabled=True)
    after(breakers, "broken", 0.0)
    assert not after(breakers, "", 1.0, tells=False)
    assert breakers.is_open("m")


def test_a_breaker_that_opens_again_begins_with_a_short_pause() -> None:
    breakers = Breakers(enabled=True)
    after(breakers, "broken", 0.0)
    for now in (1.0, 10.0, 20.0):
        breakers.began("m", now)
    after(breakers, "", 20.0)
    after(breakers, "broken", 100.0)
    assert not breakers.lets("m", 100.0 + FIRST_PAUSE / 2)
    assert breakers.lets("m", 100.0 + FIRST_PAUSE)


# ---------------------------------------------------------------------- in the corridor, with a replica of the test's


def test_nothing_of_a_broken_model_is_answered_dead_lettered_or_committed() -> None:
    scene = Scene(batch__max_batch_size=2).join()
    scene.publish(*"abcdef")
    scene.turn(2)
    for _ in range(3):
        scene.finish(unsound="ValueError: broken")
        scene.turn(4, seconds=5)
    assert scene.answered == []
    assert scene.broker.records("dead") == []
    assert scene.committed == {}
    assert scene.worker._custody.requests == 6
    reasons = scene.health.ready()
    assert "fails its own warm-up example, too (ValueError: broken)" in reasons["breaker model"]
    assert "mend the model" in reasons["breaker model"]
    assert scene.health.live() == {}
    assert value(scene.worker, "forebay_breaker_open") == 1
    assert value(scene.worker, "forebay_breaker_opened_total") == 1


def test_while_the_breaker_is_open_one_batch_at_a_time_tries() -> None:
    scene = Scene(batch__max_batch_size=2).join()
    scene.publish(*"abcdefgh")
    scene.turn(2)
    assert len(scene.replica.jobs) == 2
    scene.finish(unsound="broken")
    scene.finish(unsound="broken")
    scene.turn(10)
    assert not scene.replica.jobs
    scene.turn(1, seconds=FIRST_PAUSE)
    scene.turn(5)
    assert len(scene.replica.jobs) == 1


def test_a_mended_model_answers_everything_that_waited_once() -> None:
    scene = Scene(batch__max_batch_size=2).join()
    scene.publish(*"abcdef")
    scene.turn(2)
    scene.finish(unsound="broken")
    scene.turn(1, seconds=5)
    while scene.worker._custody.requests:
        if scene.replica.jobs:
            scene.finish()
        scene.turn()
    scene.turn(2, seconds=1)
    assert sorted(scene.answered) == list("abcdef")
    assert scene.committed == {P0: 6}
    assert scene.health.ready() == {}
    assert value(scene.worker, "forebay_breaker_open") == 0


def test_expired_requests_are_answered_while_the_breaker_is_open() -> None:
    scene = Scene().join()
    scene.publish("late", timeout_ms=1_000)
    scene.turn()
    scene.finish(unsound="broken")
    scene.turn(3, seconds=1)
    assert codes(scene.broker) == {"late": "deadline_exceeded"}


def test_a_worker_whose_model_is_broken_drains_at_once_and_gives_everything_back() -> None:
    scene = Scene(batch__max_batch_size=2).join()
    scene.publish(*"abcd")
    scene.turn(2)
    scene.finish(unsound="broken")
    scene.finish(unsound="broken")
    scene.turn(3)
    began = scene.clock.now
    scene.worker._drain()
    assert scene.clock.now - began < 1
    assert scene.answered == []
    assert scene.committed == {}


def test_a_partition_that_is_revoked_while_the_breaker_is_open_is_given_back_at_once() -> None:
    scene = Scene(2, batch__max_batch_size=2).join()
    scene.publish("a", "b", partition=0)
    scene.publish("c", "d", partition=1)
    scene.turn(2)
    scene.finish(unsound="broken")
    scene.finish(unsound="broken")
    began = scene.clock.now
    scene.consumer.revoke([P0])
    scene.turn(2)
    assert scene.clock.now - began < 1
    assert scene.worker._custody.requests == 2
    assert scene.committed == {}


def test_a_batch_of_a_lost_partition_that_comes_back_broken_is_dropped() -> None:
    scene = Scene(2).join()
    scene.publish("a", partition=0)
    scene.turn(2)
    scene.consumer.lose([P0])
    scene.turn()
    scene.finish(unsound="broken")
    scene.turn(3, seconds=2)
    assert not scene.replica.jobs
    assert scene.worker._custody.requests == 0


def test_a_breaker_that_is_off_answers_with_the_errors() -> None:
    scene = Scene(delivery__breaker=False).join()
    scene.publish("a", "b")
    scene.turn()
    while scene.replica.jobs:
        scene.finish(unsound="broken")
    assert codes(scene.broker) == {"a": "model_error", "b": "model_error"}
    assert scene.health.ready() == {}


def value(worker: Worker, name: str) -> float | None:
    return worker._observer._metrics.registry.get_sample_value(name, {"model": "model"})
