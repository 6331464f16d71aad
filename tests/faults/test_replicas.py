"""Deaths of a replica: only the guilty request pays, and the worker keeps its place in the group."""

from __future__ import annotations

import json
import signal
from functools import partial

import psutil

from tests.integration.job import Job, ask, check_answers, check_once, error_code, magic
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import eventually, is_gone
from tests.magic import Magic


def check_never_rebalanced(worker: WorkerProcess) -> None:
    """Fail if the worker had its partitions more than once."""
    assert worker.metric("forebay_rebalances_total", kind="assigned") == 1
    assert worker.metric("forebay_rebalances_total") == 1


def test_rows_that_break_the_model_fail_alone(job: Job) -> None:
    """One execution fails or is not finite: the batch is taken apart, and no replica dies."""
    bad = {"raise": Magic.RAISE, "nan": Magic.NAN, "hog": Magic.HOG}
    sends = [ask(n, 1 + n % 2) for n in range(200)]
    for place, (name, value) in enumerate(bad.items()):
        sends.insert(50 * place + 7, magic(name, value))
    job.send(sends)
    worker = job.start(batch__max_batch_size=32)
    outcomes = job.await_settled()

    check_once(outcomes, [*map(str, range(200)), *bad])
    good = [outcome for outcome in outcomes if (outcome.key or b"").isdigit()]
    check_answers(good, {n: 1 + n % 2 for n in range(200)})
    codes = {(outcome.key or b"").decode(): error_code(outcome) for outcome in outcomes if outcome not in good}
    assert codes == {"raise": "model_error", "nan": "non_finite_output", "hog": "resource_exhausted"}
    assert sorted((letter.key or b"").decode() for letter in job.dead_letters()) == sorted(bad)
    [failed] = [outcome for outcome in outcomes if outcome.key == b"raise"]
    assert "this row is poison" in json.loads(failed.value or b"")["error"]
    assert worker.metric("forebay_replica_restarts_total") == 0
    assert worker.metric("forebay_isolation_executions_total") > 0


def test_rows_that_take_the_replica_along_are_poisoned_and_their_neighbours_are_not(job: Job) -> None:
    bad = {"segfault": Magic.SEGFAULT, "hang": Magic.HANG}
    sends = [ask(n) for n in range(150)]
    for place, (name, value) in enumerate(bad.items()):
        sends.insert(40 * place + 20, magic(name, value))
    job.send(sends)
    worker = job.start(
        batch__max_batch_size=16,
        delivery__max_attempts=2,
        inference__execution_timeout_ms=1000,
        inference__max_restarts=20,
    )
    outcomes = job.await_settled(240)

    check_once(outcomes, [*map(str, range(150)), *bad])
    good = [outcome for outcome in outcomes if (outcome.key or b"").isdigit()]
    check_answers(good)
    assert {error_code(outcome) for outcome in outcomes if outcome not in good} == {"poisoned"}
    letters = job.dead_letters()
    assert sorted((letter.key or b"").decode() for letter in letters) == sorted(bad)
    assert {letter.header("forebay-attempts") for letter in letters} == {b"2"}
    reasons = {letter.key: letter.header("kafka_dlt-exception-message") or b"" for letter in letters}
    assert b"signal 11" in reasons[b"segfault"]
    assert b"inference.execution_timeout_ms" in reasons[b"hang"]
    assert worker.metric("forebay_replica_restarts_total") == 4
    check_never_rebalanced(worker)
    worker.await_ready()


def test_a_replica_that_is_killed_or_frozen_under_load_is_replaced_and_nobody_notices(job: Job) -> None:
    total = 10_000
    job.send(ask(n) for n in range(total))
    worker = job.start(
        batch__max_batch_size=16,
        model__options={"seconds": 0.004},
        inference__execution_timeout_ms=1500,
        inference__start_method="spawn",  # it takes long enough to be seen
    )
    gone: list[psutil.Process] = []
    for number, wave in ((signal.SIGKILL, 1_000), (signal.SIGSTOP, 3_000)):
        job.await_answered(wave)
        [replica] = worker.replicas()
        replica.send_signal(number)
        gone.append(replica)
        reasons = worker.await_not_ready()
        assert reasons == {"model model": "no replica is ready"}
        eventually(partial(is_gone, replica), "the replica is gone")
        worker.await_ready()
    outcomes = job.await_settled()

    check_once(outcomes, map(str, range(total)))
    check_answers(outcomes)
    check_never_rebalanced(worker)
    assert len(worker.events("replica_lost")) == 2
    assert len(worker.replicas()) == 1
    assert worker.stop() == 0


def test_replicas_that_keep_dying_end_the_worker_with_code_75_and_commit_nothing(job: Job) -> None:
    job.send(magic(f"bad-{n}", Magic.EXIT) for n in range(5))
    worker = job.launch(inference__max_restarts=1, batch__max_batch_size=1)

    assert worker.wait() == 75, worker.text()
    assert "Traceback" not in worker.text()
    last = worker.text().strip().splitlines()[-1]
    assert last.startswith("forebay: replicas died 2 times")
    assert "code 9" in last
    assert job.answered() == 0
    assert not any(job.kafka.committed_offsets(job.group, job.requests).values())
