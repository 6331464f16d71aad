"""Queue mode against a real Kafka: more workers than partitions, a death, a killer record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.records import Code
from tests.integration.job import Job, MakeJob, ask, check_answers, check_nothing_lost, error_code, magic
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import KafkaProbe, Send, eventually
from tests.magic import Magic

SMALL_BATCHES = {"batch_num_messages": 5, "linger_ms": 0}
"""The broker lends whole batches of the producer: small ones are easily shared."""


def sharing(job: Job, **changes: Any) -> WorkerProcess:
    """Launch a worker in queue mode."""
    quick = {"topic.metadata.refresh.interval.ms": 1000}
    options = {"batch__max_batch_size": 4, "batch__max_queue_size": 12, "kafka__client": quick, **changes}
    return job.launch(delivery__share_group=True, **options)


def publish(job: Job, records: list[Send]) -> None:
    job.kafka.produce(job.requests, records, **SMALL_BATCHES)


def answered(job: Job) -> set[bytes | None]:
    return {outcome.key for outcome in job.outcomes()}


def held(worker: WorkerProcess) -> float:
    return worker.metric("forebay_queue_requests") + worker.metric("forebay_in_flight_requests")


def test_three_workers_share_one_partition_and_what_a_killed_one_held_is_answered_by_the_others(
    kafka: KafkaProbe, make_job: MakeJob, tmp_path: Path
) -> None:
    """Every worker has work at once, though there is one partition; the killer of replicas is poisoned meanwhile."""
    job, gate, total = make_job(kafka, partitions=1), tmp_path / "gate", 150
    gate.touch()
    workers = [sharing(job, model__options={"gate": str(gate)}) for _ in range(3)]
    for worker in workers:
        worker.await_ready()
    publish(job, [*(ask(n) for n in range(total)), magic("killer", Magic.SEGFAULT)])
    eventually(lambda: all(held(worker) > 0 for worker in workers), "each of three workers has requests", 60)
    assert job.answered() == 0

    workers[0].kill()
    gate.unlink()
    expected = [*map(str, range(total)), "killer"]
    eventually(lambda: len(answered(job)) == len(expected), "every request is answered", 120, 0.5)
    outcomes = job.outcomes()

    check_nothing_lost(outcomes, expected)
    check_answers(outcome for outcome in outcomes if outcome.key != b"killer")
    assert {error_code(outcome) for outcome in outcomes if outcome.key == b"killer"} == {Code.POISONED}
    assert {letter.key for letter in job.dead_letters()} == {b"killer"}
    for worker in workers[1:]:
        assert worker.metric("forebay_commits_total", result="ok") > 0
        assert worker.stop() == 0
        assert worker.events("experimental")
