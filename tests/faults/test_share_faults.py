"""Queue mode under faults: a request that ends every worker, and a broker that dies under load."""

from __future__ import annotations

import time
from itertools import count

import pytest

from forebay.records import Code
from tests.conftest import EmbeddedKafkas
from tests.integration.job import Job, MakeJob, ask, check_answers, check_nothing_lost, error_code, magic
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import KafkaProbe, eventually
from tests.magic import Magic

pytestmark = pytest.mark.long

DELIVERIES = 5
"""What a share group allows by default."""


def sharing(job: Job, **changes: object) -> WorkerProcess:
    options = {"batch__max_batch_size": 4, "batch__max_queue_size": 12, "kafka__client": {}, **changes}
    return job.launch(delivery__share_group=True, **options)


def ids(job: Job) -> set[str]:
    return {(outcome.key or b"").decode() for outcome in job.outcomes()}


def test_a_request_that_ends_every_worker_is_poisoned_before_the_broker_drops_it(
    kafka: KafkaProbe, make_job: MakeJob
) -> None:
    """The model runs in the loop's own process, so the request takes the worker along, and only the broker counts."""
    job, total = make_job(kafka, partitions=1), 40
    records = [*(ask(n) for n in range(17)), magic("killer", Magic.EXIT), *(ask(n) for n in range(17, total))]
    kafka.produce(job.requests, records, batch_num_messages=5, linger_ms=0)
    for _ in range(DELIVERIES - 1):
        worker = sharing(job, inference__executor="inline")
        assert worker.wait(240) == 9, worker.text()
        assert "killer" not in ids(job)
    last = sharing(job, inference__executor="inline")
    eventually(lambda: len(ids(job)) == total + 1, "every request is answered", 240, 0.5)

    outcomes = job.outcomes()
    check_nothing_lost(outcomes, [*map(str, range(total)), "killer"])
    poisoned = {outcome.key: error_code(outcome) for outcome in outcomes if outcome.header("status") == b"error"}
    assert poisoned[b"killer"] == Code.POISONED
    assert set(poisoned.values()) == {Code.POISONED}, "those lent along with it every time may share its fate"
    assert len(poisoned) <= 12
    assert {letter.key for letter in job.dead_letters()} == poisoned.keys()
    check_answers(outcome for outcome in outcomes if outcome.header("status") == b"ok")
    assert last.stop() == 0


def test_a_broker_that_dies_and_comes_back_under_load_costs_nothing_but_repeats(
    embedded_kafka: EmbeddedKafkas, make_job: MakeJob
) -> None:
    cluster = embedded_kafka()
    kafka = KafkaProbe(cluster.bootstrap_servers)
    job = make_job(kafka, partitions=1)
    worker = sharing(job, model__options={"seconds": 0.02}, batch__max_queue_size=256).await_ready()
    numbers = count()

    def load(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            kafka.produce(job.requests, [ask(next(numbers)) for _ in range(20)])

    load(5.0)
    kafka.produce(job.requests, [ask(next(numbers)) for _ in range(400)])
    cluster.kill()
    cluster.restart()
    load(5.0)
    total = next(numbers)
    eventually(lambda: len(ids(job)) == total, "every request is answered", 240, 0.5)

    outcomes = job.outcomes()
    check_nothing_lost(outcomes, map(str, range(total)))
    check_answers(outcomes)
    assert worker.stop() == 0
