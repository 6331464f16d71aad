"""Groups of workers on real Kafka: they join and leave under load, stall, and find new partitions."""

from __future__ import annotations

import random
import signal
from typing import Any

import numpy as np
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

from tests.integration.job import QUICK, Job, MakeJob, ask, ask_rows, check_answers, check_nothing_lost, check_once
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import KafkaProbe, eventually

PROTOCOLS: dict[str, dict[str, Any]] = {
    "classic": {"kafka__group_protocol": "classic"},
    "consumer": {"kafka__group_protocol": "consumer", "kafka__client": {"topic.metadata.refresh.interval.ms": 1000}},
}
both = pytest.mark.parametrize("protocol", PROTOCOLS)
consumer_is_long = pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.long)])


def await_shared(*workers: WorkerProcess) -> None:
    """Wait until every one of these workers has partitions."""
    eventually(
        lambda: all(worker.metric("forebay_partitions_assigned") >= 1 for worker in workers),
        f"each of {len(workers)} workers has partitions",
        60,
    )


@both
def test_workers_that_join_and_leave_in_order_cost_nothing_and_answer_nothing_twice(
    kafka: KafkaProbe, make_job: MakeJob, protocol: str
) -> None:
    job = make_job(kafka, partitions=6)
    options = {**PROTOCOLS[protocol], "batch__max_batch_size": 4, "model__options": {"seconds": 0.01}}
    total = 6_000
    first, second, third = workers = [job.launch(**options) for _ in range(3)]
    job.send(ask(n) for n in range(total))
    for worker in workers:
        worker.await_ready()
    await_shared(*workers)
    assert job.answered() < total, "they joined too late to say anything"
    for worker in (second, first):
        below = job.answered()
        assert worker.stop() == 0
        job.await_answered(min(below + 50, total))
    await_shared(third)

    outcomes = job.await_settled(180)

    check_once(outcomes, map(str, range(total)))
    check_answers(outcomes)
    assert third.metric("forebay_partitions_assigned") == 6
    assert all(worker.metric("forebay_rebalances_total", kind="lost") == 0 for worker in [third])
    assert not [event for worker in workers for event in worker.events("partitions_lost")]


@consumer_is_long
def test_a_revoked_partition_is_settled_whatever_overtook_in_it(
    kafka: KafkaProbe, make_job: MakeJob, protocol: str
) -> None:
    """Malformed, urgent and differently shaped requests are answered before what was read ahead of them."""
    job = make_job(kafka, partitions=4)
    chance = random.Random(5)
    total = 3_000

    def request(n: int) -> Any:
        kind = chance.random()
        if kind < 0.1:
            return ask_rows(str(n), np.zeros((2, 0, 2), np.float32))  # not a matrix: refused at once
        return ask_rows(str(n), np.full((1, 1 + n % 5), n, np.float32), headers=[("priority", b"%d" % (1 + n % 7))])

    job.send(request(n) for n in range(total))
    options = {
        **PROTOCOLS[protocol],
        "model__factory": "tests.models:Ragged",
        "model__options": {"seconds": 0.004},
        "batch__max_batch_size": 4,
        "batch__max_queue_size": 400,
    }
    first = job.launch(**options)
    second = job.launch(**options)
    first.await_ready()
    second.await_ready()
    await_shared(first, second)
    assert first.stop() == 0
    outcomes = job.await_settled()

    check_once(outcomes, map(str, range(total)))


@consumer_is_long
def test_a_worker_that_comes_back_from_a_freeze_loses_nothing_and_commits_nothing_of_others(
    job: Job, protocol: str
) -> None:
    options: dict[str, Any] = {**PROTOCOLS[protocol], "batch__max_batch_size": 4, "model__options": {"seconds": 0.01}}
    total = 4_000
    job.send(ask(n) for n in range(total))
    frozen, other = job.launch(**options), job.launch(**options)
    frozen.await_ready()
    other.await_ready()
    await_shared(frozen, other)
    frozen.signal(signal.SIGSTOP)
    eventually(
        lambda: other.metric("forebay_partitions_assigned") == 3,
        "the other worker gets the frozen one's partitions",
        60,
    )
    job.await_answered(job.answered() + 100)
    frozen.signal(signal.SIGCONT)
    await_shared(frozen, other)

    outcomes = job.await_settled(180)

    check_nothing_lost(outcomes, map(str, range(total)))
    check_answers(outcomes)
    assert frozen.stop() == 0
    assert other.stop() == 0
    assert job.is_settled()


def test_partitions_that_are_added_while_it_runs_are_consumed(job: Job) -> None:
    worker = job.start(kafka__client={**QUICK, "topic.metadata.refresh.interval.ms": 500})
    job.send(ask(n) for n in range(30))
    job.await_answered(30)
    admin = AdminClient(job.kafka.config)
    for future in admin.create_partitions([NewPartitions(job.requests, 5)]).values():
        future.result(30)
    eventually(lambda: worker.metric("forebay_partitions_assigned") == 5, "the new partitions are assigned", 60)
    job.send(ask(n, partition=n % 5) for n in range(30, 80))

    check_once(job.await_settled(), map(str, range(80)))
