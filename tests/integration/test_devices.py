"""`forebay run --devices`: one worker per device on real Kafka, on fake devices."""

from __future__ import annotations

import signal

import psutil

from tests.integration.job import Job, MakeJob, ask, check_answers, check_nothing_lost, check_once
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import KafkaProbe, eventually

TWO = ["--devices", "fake:0,fake:1"]
NAMES = ("fake:0", "fake:1")
PATIENT = 240.0  # twice as many processes start as in other tests


def test_both_devices_work_and_a_worker_that_is_killed_comes_back(kafka: KafkaProbe, make_job: MakeJob) -> None:
    job = make_job(kafka, partitions=4)
    supervisor = job.launch(TWO, batch__max_batch_size=8, model__options={"seconds": 0.005})
    supervisor.await_ready(PATIENT)
    for name in NAMES:
        eventually(
            lambda name=name: supervisor.metric("forebay_partitions_assigned", device=name) == 2,
            f"{name} has two partitions",
            60,
        )
    job.send(map(ask, range(800)))
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(800)))
    check_answers(outcomes)
    for name in NAMES:
        assert supervisor.metric("forebay_requests_total", device=name, outcome="ok") > 0
    assert {event["device"] for event in supervisor.events("drained") + supervisor.events("serving")} == set(NAMES)

    job.send(ask(n) for n in range(800, 1600))
    job.await_answered(900)
    pid = next(event["pid"] for event in supervisor.events("worker_started") if event["device"] == "fake:1")
    psutil.Process(pid).kill()
    supervisor.await_metric("forebay_worker_restarts_total", 1, device="fake:1")
    outcomes = job.await_settled()
    check_nothing_lost(outcomes, map(str, range(1600)))
    check_answers(outcomes)
    supervisor.await_ready()
    assert supervisor.metric("forebay_workers_running") == 2

    supervisor.kill()  # it also sees that nobody outlives the supervisor
    assert {event["device"] for event in supervisor.events("drained")} == set(NAMES)


def test_workers_of_all_devices_drain_at_sigterm_and_end_at_the_end(job: Job) -> None:
    job.send(map(ask, range(60)))
    ended = job.launch([*TWO, "--until-end"])
    assert ended.wait(PATIENT) == 0, ended.text()
    check_once(job.outcomes(), map(str, range(60)))

    supervisor = job.launch(TWO).await_ready(PATIENT)
    supervisor.signal(signal.SIGTERM)
    assert supervisor.wait() == 0, supervisor.text()
    assert {event["device"] for event in supervisor.events("drained")} == set(NAMES)


def test_a_model_that_cannot_start_on_any_device_is_told_once(job: Job) -> None:
    worker = job.launch(TWO, model__factory="tests.models:FailsWarmUp")
    assert worker.wait(PATIENT) == 78
    assert worker.text().count("forebay: fake:") == 1
    assert "the warm-up is too much" in worker.text()


def test_replicas_that_gain_nothing_are_told_at_the_start_and_serve_all_the_same(job: Job) -> None:
    models = [{"name": name.lower(), "factory": f"tests.contenders:{name}"} for name in ("Sleeps", "Crowds")]
    changes = {"inference.executor": "thread", "inference.replicas": 2, "models": models}
    settings = {key: value for key, value in job.settings().items() if key != "model.factory"}
    worker = WorkerProcess({**settings, **changes}, job.folder / "compared.log")
    job.workers.append(worker)
    job.send(map(ask, range(20)))
    worker.await_ready()
    found = {event["model"]: event for event in worker.events("replicas_compared")}
    assert found["sleeps"]["level"] == "info"
    assert found["crowds"]["level"] == "warning"
    assert "set inference.replicas to 1" in found["crowds"]["mend"]
    assert worker.metric("forebay_replica_gain", model="crowds") < 1.05
    assert worker.metric("forebay_replica_gain", model="sleeps") > 1.05
    check_once(job.await_settled(), map(str, range(20)))
