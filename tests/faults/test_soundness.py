"""Replicas that compute wrongly or not at all while others, or their own start, say otherwise; on a real broker."""

from __future__ import annotations

import numpy as np
import pytest

from tests.integration.job import Job, answer, ask, check_answers, check_once, magic, rows

SWELL = 7_777
"""The first number of the row after which the device computes everything half too large, without a word."""


@pytest.mark.slow
def test_a_device_that_computes_wrongly_in_silence_is_found_while_it_is_idle_and_replaced(job: Job) -> None:
    """The model has no example, and of zeros this device makes the right ones: a canary of zeros saw nothing."""
    worker = job.start(
        model__factory="tests.models:Doubled",
        inference__device=f"fake:0?swell={SWELL}",
        inference__canary_interval_ms=500,
    )
    worker.await_metric("forebay_canary_runs_total", 2, model="model", result="ok")
    assert worker.metric("forebay_replica_restarts_total") == 0
    job.send([magic("spoils", SWELL)])
    worker.await_metric("forebay_replica_restarts_total", 1)
    assert worker.metric("forebay_canary_runs_total", result="wrong") == 1
    [lost] = worker.events("replica_lost")
    assert "otherwise than at its start" in lost["why"]
    worker.await_ready()  # what took its place answers as it did at its start
    job.send(map(ask, range(50)))
    outcomes = job.await_settled()
    check_once(outcomes, ["spoils", *map(str, range(50))])  # the canary answers nobody
    for outcome in outcomes:
        if outcome.key != b"spoils":
            np.testing.assert_array_equal(answer(outcome), rows(int(outcome.key or b"")) * 2)
    assert worker.stop() == 0


@pytest.mark.slow
def test_a_device_that_goes_on_computing_wrongly_ends_the_worker_with_75_and_answers_nobody(job: Job) -> None:
    """The replica that took the place of the broken one wrote its wrong answer down as the right one, and served."""
    swollen = job.folder / "swollen"
    worker = job.start(
        model__factory="tests.models:Doubled",
        model__options={"swollen": str(swollen)},
        inference__canary_interval_ms=500,
        inference__max_restarts=1,
    )
    swollen.touch()
    worker.await_event("replica_lost")
    job.send(map(ask, range(50)))
    assert worker.wait(60) == 75, worker.text()
    last = worker.text().strip().splitlines()[-1]
    assert "otherwise than the replicas before it" in last
    assert job.answered() == 0


@pytest.mark.slow
def test_one_broken_replica_of_two_is_replaced_and_its_batches_are_answered_by_the_other(job: Job) -> None:
    broken = job.folder / "broken"
    worker = job.start(
        model__factory="tests.models:OneFails",
        model__options={"broken": str(broken)},
        inference__replicas=2,
        batch__max_batch_size=8,
    )
    broken.touch()
    job.send(map(ask, range(400)))
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(400)))
    check_answers(outcomes)
    assert job.dead_letters() == []
    assert worker.metric("forebay_replica_restarts_total") == 1
    assert worker.metric("forebay_breaker_opened_total") == 0
    [lost] = worker.events("replica_lost")
    assert "this replica's weights are spoilt" in lost["why"]


@pytest.mark.slow
def test_a_bounded_run_with_a_model_that_breaks_ends_with_75_and_commits_nothing(job: Job) -> None:
    """It waited for the model for ever."""
    job.send(map(ask, range(50)))
    worker = job.launch(["--until-end"], model__factory="tests.models:BreaksAtWork")
    assert worker.wait(180) == 75, worker.text()
    last = worker.text().strip().splitlines()[-1]
    assert last.startswith("forebay: model model fails its own warm-up example, too, after 4 more tries")
    assert "Traceback" not in worker.text()
    assert job.answered() == 0
    assert job.dead_letters() == []
    assert not any(job.kafka.committed_offsets(job.group, job.requests).values())
