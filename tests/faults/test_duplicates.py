"""One outcome per request id, when the worker that knows the ids is killed."""

from __future__ import annotations

import pytest

from tests.faults.checker import check
from tests.faults.history import Promise, View
from tests.faults.mutants import AT_LEAST_ONCE, EXACTLY_ONCE, IN_ORDER, IN_ORDER_OF_KEYS
from tests.faults.repeating import RepeatingRun
from tests.integration.job import Job, ask, check_answers, check_once

SCHEDULES = 60
ONCE = {"delivery__deduplicate_ms": 3_600_000, "batch__max_batch_size": 8}


@pytest.mark.slow
def test_after_a_kill_the_successor_knows_which_ids_were_answered(job: Job) -> None:
    """A retry is sent twice: while the first owner lives, and when its successor must have read the ids again."""
    job.send(map(ask, range(200)))
    first = job.start(**ONCE)
    job.await_settled()
    job.send(map(ask, range(0, 200, 2)))
    job.await_settled()
    first.await_metric("forebay_duplicates_total", 100)
    first.kill()
    job.send([*map(ask, range(1, 200, 2)), *map(ask, range(200, 260)), *map(ask, range(250, 260))])
    second = job.start(**ONCE, ops__log_level="debug")
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(260)))
    check_answers(outcomes)
    second.await_metric("forebay_duplicates_total", 110)
    assert sum(event["records"] for event in second.events("duplicates")) == 110
    assert second.stop() == 0


@pytest.mark.parametrize("promise", [AT_LEAST_ONCE, EXACTLY_ONCE, IN_ORDER, IN_ORDER_OF_KEYS], ids=str)
def test_in_every_schedule_an_id_is_answered_once_and_nothing_is_lost(promise: Promise) -> None:
    repeated = 0
    for seed in range(SCHEDULES):
        run = RepeatingRun(seed, promise)
        history = run.play()
        found = check(history)
        assert not found, f"seed {seed}, {run.promise}: " + "\n".join(map(str, found))
        answered = View(history).outcomes_of
        repeated += sum(record.position not in answered for record in history.inputs)
    assert repeated > SCHEDULES, "many were repeats"
