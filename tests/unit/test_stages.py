"""The stages of a start: a replica says what it begins to do, and the pool tells it on."""

from __future__ import annotations

import json

from forebay.failures import account
from forebay.inference.messages import Stage
from forebay.metrics import Metrics
from tests.unit.test_pool import Scene


def test_the_pool_tells_each_stage_with_its_replica_and_goes_on_waiting() -> None:
    scene = Scene(replicas=2, ready=False)
    scene.fakes[1].say(Stage("loading", {"device": "cpu"}))
    scene.fakes[1].say(Stage("checking", {}))
    scene.collect()
    told = [(notice.event, notice.model, notice.fields) for notice in scene.pool.notices]
    assert told == [
        ("replica_loading", "model", {"replica": "r1", "device": "cpu"}),
        ("replica_checking", "model", {"replica": "r1"}),
    ]
    assert not scene.pool.ready
    for fake in scene.fakes:
        fake.get_ready()
    scene.collect()
    assert scene.pool.ready


def test_the_last_line_counts_what_was_answered_and_how_it_ended() -> None:
    """`--until-end` came and went without a count."""
    metrics = Metrics()
    metrics.requests.labels("a", "ok").inc(5)
    metrics.requests.labels("b", "ok").inc(2)
    metrics.requests.labels("a", "model_error").inc(1)
    metrics.requests.labels("unknown", "invalid_payload").inc(3)
    metrics.requests.labels("b", "poisoned")
    told = account(metrics.outcomes(), 12.345)
    assert told == {"requests": 11, "ok": 7, "errors": {"model_error": 1, "invalid_payload": 3}, "seconds": 12.3}
    assert account(Metrics().outcomes(), 0.0) == {"requests": 0, "ok": 0, "errors": {}, "seconds": 0.0}
    json.dumps(told)
