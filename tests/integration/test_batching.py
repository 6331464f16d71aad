"""The batching room as a user meets it: `forebay run` on a real Kafka, its outcomes and its metrics."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from forebay.records import Code
from tests.integration.job import Job, answer, ask, check_answers, check_once, error_code


def sizes(job: Job) -> Counter[bytes | None]:
    """Return how many outcomes say that they ran in a batch of each size."""
    return Counter(outcome.header("batch-size") for outcome in job.outcomes())


def closed(tmp_path: Path) -> Path:
    gate = tmp_path / "gate"
    gate.touch()
    return gate


def test_a_request_behind_a_long_batch_is_answered_at_its_deadline_and_costs_no_forward(
    job: Job, tmp_path: Path
) -> None:
    gate = closed(tmp_path)
    worker = job.start(**{"model.options": {"gate": str(gate)}, "batch.max_batch_size": 4})
    job.send([ask(0)])
    worker.await_metric("forebay_in_flight_requests", 1)
    dated = [ask(number, headers=[("timeout-ms", b"500")]) for number in range(1, 11)]
    job.send([*dated, ask(11)])
    job.await_answered(10)
    assert gate.exists()
    assert {error_code(outcome) for outcome in job.outcomes()} == {Code.DEADLINE_EXCEEDED.value}

    gate.unlink()
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(12)))
    assert {o.key: answer(o)[0, 0] for o in outcomes if o.header("status") == b"ok"} == {b"0": 3.0, b"11": 25.0}
    assert job.dead_letters() == []
    worker.await_metric("forebay_executions_total", 2)
    assert worker.metric("forebay_batch_cuts_total") == 2


def test_what_waits_while_a_batch_runs_goes_together_and_every_execution_has_a_reason(job: Job) -> None:
    """The first request teaches that one takes three seconds; behind the second, the others have time to gather."""
    worker = job.start(**{"model.options": {"seconds": 3.0}, "batch.max_batch_size": 32})
    job.send([ask(0)])
    job.await_answered(1)
    job.send([ask(1)])
    worker.await_metric("forebay_in_flight_requests", 1)
    job.send(ask(number) for number in range(2, 42))
    worker.await_metric("forebay_in_flight_requests", 33)  # a full batch is staged, the rest goes on gathering
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(42)))
    check_answers(outcomes)
    assert sizes(job) == {b"1": 2, b"32": 32, b"8": 8}
    worker.await_metric("forebay_executions_total", 4)
    assert worker.metric("forebay_batch_cuts_total") == 4
    assert worker.metric("forebay_batch_cuts_total", reason="full_rows") == 1
    assert worker.metric("forebay_service_time_seconds", rows="1", quantile="0.5") >= 3


def test_lingering_fills_a_batch_and_a_full_one_leaves_before_its_time(job: Job) -> None:
    job.start(**{"batch.dispatch": "linger", "batch.max_wait_ms": 600_000, "batch.max_batch_size": 8})
    for number in range(8):
        job.send([ask(number)])
    job.await_settled()
    assert sizes(job) == {b"8": 8}


def test_a_request_larger_than_a_batch_is_split_and_its_executions_are_told_apart(job: Job) -> None:
    worker = job.start(**{"batch.max_batch_size": 8})
    job.send([ask(0, 20)])
    check_answers(job.await_settled(), {0: 20})
    worker.await_metric("forebay_executions_total", 3)
    assert worker.metric("forebay_batch_cuts_total", reason="full_rows") == 1
    assert worker.metric("forebay_batch_cuts_total", reason="split") == 2


def test_rows_between_allowed_sizes_are_padded_and_nobody_sees_it(job: Job) -> None:
    job.send(ask(number, 3) for number in range(30))
    job.run_to_end(**{"batch.max_batch_size": 16, "batch.allowed_batch_sizes": "4,16"})
    outcomes = job.outcomes()
    check_once(outcomes, map(str, range(30)))
    check_answers(outcomes, dict.fromkeys(range(30), 3))


def test_deferred_batches_go_together_before_their_deadline(job: Job) -> None:
    worker = job.start(**{"batch.dispatch": "defer", "batch.default_timeout_ms": 2_000, "batch.max_batch_size": 32})
    for number in range(10):
        job.send([ask(number)])
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(10)))
    check_answers(outcomes)
    assert worker.metric("forebay_executions_total") < 10
    assert worker.metric("forebay_batch_cuts_total", reason="deadline") >= 1
