"""A model that breaks while it serves, on a real broker: nothing is answered or lost, and it goes on by itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.job import Job, ask, check_answers, check_once, error_code, magic
from tests.magic import Magic

SIZES = {"batch__max_batch_size": 16}


def fragile(broken: Path) -> dict[str, Any]:
    return {"model__factory": "tests.models:Fragile", "model__options": {"broken": str(broken)}}


@pytest.mark.slow
@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_a_broken_model_empties_no_topic_into_the_dead_letters(job: Job, guarantee: str) -> None:
    broken = job.folder / "broken"
    worker = job.start(**SIZES, **fragile(broken), delivery__guarantee=guarantee)
    job.send(map(ask, range(100)))
    job.await_settled()
    committed = job.kafka.committed_offsets(job.group, job.requests)

    broken.touch()
    job.send(map(ask, range(100, 600)))
    reasons = worker.await_not_ready()
    assert "the model cannot reach its weights" in reasons["breaker model"]
    time.sleep(3)  # a few tries
    assert len({outcome.key for outcome in job.kafka.read_all(job.results, committed_only=True)}) == 100
    assert job.dead_letters() == []
    assert job.kafka.committed_offsets(job.group, job.requests) == committed
    assert worker.get("/livez")[0] == 200
    assert worker.metric("forebay_breaker_opened_total") == 1

    broken.unlink()
    worker.await_ready()
    job.await_settled()
    outcomes = job.kafka.read_all(job.results, committed_only=True)
    check_once(outcomes, map(str, range(600)))
    check_answers(outcomes)
    assert job.dead_letters() == []
    assert worker.stop() == 0


@pytest.mark.slow
def test_a_worker_with_a_broken_model_stops_at_once_and_its_successor_answers(job: Job) -> None:
    broken = job.folder / "broken"
    worker = job.start(**SIZES, **fragile(broken), delivery__drain_timeout_ms=600_000)
    broken.touch()
    job.send(map(ask, range(50)))
    worker.await_not_ready()
    assert worker.stop() == 0
    job.start(**SIZES)
    check_once(job.await_settled(), map(str, range(50)))
    assert job.dead_letters() == []


def test_a_client_that_sends_nothing_but_poison_is_answered(job: Job) -> None:
    worker = job.start(**SIZES)
    job.send(magic(str(number), Magic.RAISE) for number in range(200))
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(200)))
    assert {error_code(outcome) for outcome in outcomes} == {"model_error"}
    assert len(job.dead_letters()) == 200
    assert worker.get("/readyz")[0] == 200
    assert worker.metric("forebay_breaker_opened_total") == 0
