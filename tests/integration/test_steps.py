"""Rows that run in steps, as a user meets them: `forebay run` on a real Kafka, a process of its own for the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import pytest

from forebay.records import Code
from tests.inference.stepwise import CRASHES, FAILS, HANGS, NOT_A_NUMBER
from tests.integration.job import Job, check_once, error_code
from tests.kafka_probe import Read, Send

COUNT, MOST = 64, 40
LENGTHS = [MOST if number % 8 == 0 else 2 + number % 3 for number in range(COUNT)]


def asks(numbers: Iterable[int], steps: Iterable[int]) -> Iterator[Send]:
    for number, count in zip(numbers, steps, strict=True):
        tensor = {"name": "n", "shape": [1, 1], "datatype": "INT64", "data": [count]}
        yield Send(json.dumps({"inputs": [tensor]}).encode(), str(number).encode())


def check(outcomes: Iterable[Read], failed: Iterable[int]) -> None:
    for outcome in outcomes:
        number = int(outcome.key or b"")
        if number not in failed:
            assert outcome.header("status") == b"ok", outcome
            passed, half = json.loads(outcome.value or b"")["outputs"]
            length = LENGTHS[number % COUNT]
            assert (passed["data"], half["data"]) == (list(range(length)), [length / 2])


@pytest.mark.parametrize("guarantee", ["at_least_once", pytest.param("exactly_once", marks=pytest.mark.long)])
def test_rows_of_all_lengths_have_their_own_results_once_and_the_guilty_their_errors(job: Job, guarantee: str) -> None:
    """Eight at a time, one in eight with 40 steps, the others with 2 to 4: static takes 40 steps for each batch."""
    job.send(asks(range(COUNT), LENGTHS))
    worker = job.start(
        **{
            "model.factory": "tests.inference.stepwise:Counting",
            "model.options": {"seconds": 0.02},
            "batch.max_batch_size": 8,
            "inference.execution_timeout_ms": 4_000,
            "delivery.max_attempts": 2,
            "delivery.guarantee": guarantee,
        }
    )
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(COUNT)))
    check(outcomes, ())
    worker.await_metric("forebay_step_rows_total", sum(LENGTHS))
    assert worker.metric("forebay_steps_total") < COUNT / 8 * MOST
    assert worker.metric("forebay_batch_cuts_total", reason="step") == COUNT

    marks = {5: FAILS, 17: NOT_A_NUMBER, 30: CRASHES, 47: HANGS}
    guilty = {COUNT + number: mark for number, mark in marks.items()}
    job.send(asks(range(COUNT, 2 * COUNT), [marks.get(number, length) for number, length in enumerate(LENGTHS)]))
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(2 * COUNT)))
    check(outcomes, guilty)
    codes = {FAILS: Code.MODEL_ERROR, NOT_A_NUMBER: Code.NON_FINITE_OUTPUT}
    found = {int(one.key or b""): error_code(one) for one in outcomes if one.header("status") != b"ok"}
    assert found == {number: codes.get(mark, Code.POISONED).value for number, mark in guilty.items()}
    assert worker.metric("forebay_batch_cuts_total") == worker.metric("forebay_executions_total")
