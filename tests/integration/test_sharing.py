"""Two models on one accelerator, the fake one, through `forebay run` on real Kafka: each has its share of the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import Topics
from tests.integration.job import Job, ask, check_answers, check_once
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import KafkaProbe

BATCHES, SIZE = 40, 8


def start(job: Job, output: str, models: list[dict[str, Any]]) -> WorkerProcess:
    """Start a worker with several models on one fake accelerator; its queue holds whatever is sent."""
    settings = job.settings(
        kafka__output_topic=output,
        inference__device="fake",
        inference__execution_timeout_ms=300_000,
        batch__max_batch_size=SIZE,
        batch__max_queue_size=10_000,
        models=models,
    )
    del settings["model.factory"]
    job.workers.append(WorkerProcess(settings, job.folder / "worker.log"))
    return job.workers[-1].await_ready()


def test_models_share_the_measured_time_and_a_hanging_one_keeps_nobody_waiting(
    job: Job, kafka: KafkaProbe, topics: Topics, tmp_path: Path
) -> None:
    [output] = topics("output", partitions=1)
    gate = tmp_path / "gate"
    large = {"name": "large", "share": 3.0, "options": {"seconds": 0.02, "gate": str(gate)}}
    small = {"name": "small", "share": 1.0, "options": {"seconds": 0.02}}
    total = 2 * BATCHES * SIZE
    job.send(ask(n, headers=[("model", (b"large", b"small")[n % 2])]) for n in range(total))
    worker = start(job, output, [{**model, "factory": "tests.models:Double"} for model in (large, small)])
    job.await_settled()

    outcomes = sorted(kafka.read_all(output), key=lambda outcome: outcome.offset)
    order = [outcome.header("model") for outcome in outcomes]
    last = max(place for place, model in enumerate(order) if model == b"large")
    beside = order[:last].count(b"small")
    assert SIZE <= beside <= total // 4  # a third of the large one's, had every batch taken as long
    assert worker.metric("forebay_model_seconds_total", model="small") > 0

    gate.touch()
    job.send(ask(n, headers=[("model", b"large")]) for n in range(total, total + 4 * SIZE))
    worker.await_held(4 * SIZE)  # its replica hangs
    job.send(ask(n, headers=[("model", b"small")]) for n in range(total + 4 * SIZE, total + 5 * SIZE))
    worker.await_metric("forebay_requests_total", total // 2 + SIZE, model="small", outcome="ok")
    gate.unlink()
    job.await_settled()
    outcomes = kafka.read_all(output)
    check_once(outcomes, map(str, range(total + 5 * SIZE)))
    check_answers(outcomes)
    assert worker.stop() == 0
