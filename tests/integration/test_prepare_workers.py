"""`inference.prepare_workers` on real Kafka: whatever becomes of a preparer, each request has one right outcome."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil

from tests.integration.job import Job, ask, check_answers, check_once, error_code, magic
from tests.integration.worker_process import WorkerProcess, name_of
from tests.kafka_probe import eventually, is_gone
from tests.magic import Magic

MODEL = {"model__factory": "tests.models:Prepares", "inference__prepare_workers": 1}


def preparers(worker: WorkerProcess) -> list[psutil.Process]:
    """Return the worker's preparers that live now."""
    return [child for child in worker.replicas() if name_of(child) == "forebay-prepare"]


def test_a_preparer_that_is_killed_or_frozen_under_load_is_replaced_and_nobody_notices(job: Job) -> None:
    total = 4_000
    job.send(ask(n, 1 + n % 2) for n in range(total))
    worker = job.start(**MODEL, model__options={"seconds": 0.001}, inference__execution_timeout_ms=1500)
    for times, number, wave in ((1, signal.SIGKILL, 500), (2, signal.SIGSTOP, 1_500)):
        job.await_answered(wave)
        [preparer] = preparers(worker)
        preparer.send_signal(number)
        worker.await_metric("forebay_preparer_restarts_total", times)
        eventually(lambda gone=preparer: is_gone(gone), "the preparer is gone")  # type: ignore[misc]
        worker.await_ready()
    outcomes = job.await_settled()

    check_once(outcomes, map(str, range(total)))
    check_answers(outcomes, {n: 1 + n % 2 for n in range(total)})
    assert worker.metric("forebay_preparer_restarts_total") == 2
    assert worker.metric("forebay_replica_restarts_total") == 0
    assert worker.metric("forebay_rebalances_total") == 1
    assert worker.metric("forebay_prepare_seconds_count", model="model") >= total
    assert worker.events("preparer_lost")[0]["why"].endswith("it was ended by signal 9")
    assert len(preparers(worker)) == 1
    assert worker.stop() == 0


def test_requests_that_take_the_preparer_along_are_poisoned_and_their_neighbours_are_not(job: Job) -> None:
    bad = {"raise": Magic.RAISE, "exit": Magic.EXIT, "hang": Magic.HANG, "nan": Magic.NAN}
    sends = [ask(n) for n in range(150)]
    for place, (name, value) in enumerate(bad.items()):
        sends.insert(30 * place + 20, magic(name, value))
    job.send(sends)
    worker = job.start(
        **MODEL, delivery__max_attempts=2, inference__execution_timeout_ms=1000, inference__max_restarts=20
    )
    outcomes = job.await_settled(240)

    check_once(outcomes, [*map(str, range(150)), *bad])
    good = [outcome for outcome in outcomes if (outcome.key or b"").isdigit()]
    check_answers(good)
    codes = {(outcome.key or b"").decode(): error_code(outcome) for outcome in outcomes if outcome not in good}
    assert codes == {"raise": "model_error", "exit": "poisoned", "hang": "poisoned", "nan": "non_finite_output"}
    reasons = {letter.key: letter.header("kafka_dlt-exception-message") or b"" for letter in job.dead_letters()}
    assert reasons[b"raise"].startswith(b"prepare: ValueError: this row is poison (models.py:")
    assert reasons[b"exit"].startswith(b"it brought its preparer down 2 times; the last: ")
    assert reasons[b"exit"].endswith(b"it exited with code 9")
    assert b"inference.execution_timeout_ms" in reasons[b"hang"]
    assert worker.metric("forebay_preparer_restarts_total") == 4
    assert worker.metric("forebay_replica_restarts_total") == 0


def test_a_worker_that_is_killed_takes_its_preparers_along_and_the_next_one_answers_the_rest(
    job: Job, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    job.send(ask(n) for n in range(60))
    worker = job.start(**MODEL, model__options={"gate": str(gate)})
    worker.await_held(60)
    assert worker.metric("forebay_preparing_requests") == 60
    worker.kill()
    gate.unlink()
    job.run_to_end(**MODEL)
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(60)))
    check_answers(outcomes)


def test_a_drain_finishes_what_is_being_prepared(job: Job, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    job.send(ask(n) for n in range(60))
    worker = job.start(**MODEL, model__options={"gate": str(gate)})
    worker.await_held(60)
    worker.signal(signal.SIGTERM)
    worker.await_event("draining")
    gate.unlink()
    assert worker.wait() == 0
    outcomes = job.outcomes()
    check_once(outcomes, map(str, range(60)))
    check_answers(outcomes)
    assert job.is_settled()


def test_a_model_without_prepare_is_refused_at_the_start(job: Job) -> None:
    worker = job.launch(inference__prepare_workers=1)
    assert worker.wait() == 78, worker.text()
    last = worker.text().strip().splitlines()[-1]
    assert "inference.prepare_workers" in last
    assert "set it to 0" in last
    assert "Traceback" not in worker.text()
