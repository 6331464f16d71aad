"""What was finished ahead of the watermark is not answered again by the next owner, on a real broker."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, TopicPartition

from forebay.stream import ahead
from tests.integration.job import Job, MakeJob, ask, check_nothing_lost, check_once, error_code, magic
from tests.kafka_probe import KafkaProbe, eventually
from tests.magic import Magic

TOTAL = 400
STUCK = {"batch__max_batch_size": 4, "inference__replicas": 2, "inference__execution_timeout_ms": 600_000}
"""One of two replicas hangs on the first request, and holds the watermark."""

AFTERWARDS = {"batch__max_batch_size": 4, "inference__execution_timeout_ms": 1_000, "delivery__max_attempts": 1}


@pytest.fixture
def single(kafka: KafkaProbe, make_job: MakeJob) -> Job:
    return make_job(kafka, partitions=1)


def committed(job: Job) -> tuple[int, str]:
    """What the group has committed for the one partition, with its metadata."""
    client = Consumer({**job.kafka.config, "group.id": job.group})
    try:
        (found,) = client.committed([TopicPartition(job.requests, 0)], timeout=20)
        return found.offset, found.metadata or ""
    finally:
        client.close()


def stick(job: Job) -> None:
    """Answer all but the batches at the replica that hangs; return when that is committed."""
    job.send([magic("hangs", Magic.HANG), *map(ask, range(TOTAL))])
    job.start(**STUCK, delivery__drain_timeout_ms=300, delivery__revoke_timeout_ms=300)
    job.await_answered(TOTAL - 8)

    def noted() -> bool:
        base, text = committed(job)
        found = ahead.read(base, text)
        return base == 0 and found is not None and len(found.offsets) == job.answered()

    eventually(noted, "the commit says all that is answered", 30)


def check_all_once(job: Job) -> None:
    outcomes = job.await_settled()
    check_once(outcomes, ["hangs", *map(str, range(TOTAL))])
    assert [error_code(one) for one in outcomes if one.key == b"hangs"] == ["poisoned"]


@pytest.mark.slow
def test_after_a_kill_what_was_finished_ahead_of_the_watermark_is_not_repeated(single: Job) -> None:
    stick(single)
    single.workers[0].kill()
    answered = single.answered()
    worker = single.start(**AFTERWARDS)
    check_all_once(single)
    worker.await_metric("forebay_recalled_records_total", answered)
    assert worker.stop() == 0


@pytest.mark.long
def test_a_second_kill_before_much_was_read_repeats_nothing_either(single: Job) -> None:
    stick(single)
    single.workers[0].kill()
    second = single.start(**STUCK, batch__max_queue_size=8)
    time.sleep(1)  # a commit or two of the second owner
    second.kill()
    single.start(**AFTERWARDS)
    check_all_once(single)


@pytest.mark.long
def test_a_drain_that_gives_up_hands_on_what_is_finished(single: Job) -> None:
    stick(single)
    assert single.workers[0].stop() == 0
    single.start(**AFTERWARDS)
    check_all_once(single)


@pytest.mark.slow
def test_a_new_member_that_takes_the_partition_over_repeats_nothing(kafka: KafkaProbe, make_job: MakeJob) -> None:
    job = make_job(kafka, partitions=2)
    job.send(replace(magic(f"hangs-{number}", Magic.HANG), partition=number) for number in range(2))
    job.send(map(ask, range(TOTAL)))
    three = {**STUCK, "inference__replicas": 3}
    first = job.start(**three, delivery__revoke_timeout_ms=300)
    job.await_answered(TOTAL - 16)
    time.sleep(1)
    job.start(**AFTERWARDS)
    eventually(lambda: first.metric("forebay_partitions_assigned") == 1, "the first has given one back", 60)
    first.kill()
    outcomes = job.await_settled()
    check_once(outcomes, ["hangs-0", "hangs-1", *map(str, range(TOTAL))])


@pytest.mark.slow
def test_where_results_keep_an_order_nothing_is_noted(single: Job) -> None:
    single.send([magic("hangs", Magic.HANG), *map(ask, range(50))])
    worker = single.start(**STUCK, delivery__ordering="key")
    single.await_answered(42)
    time.sleep(1)
    assert committed(single) == (0, "")
    worker.kill()
    single.start(**AFTERWARDS, delivery__ordering="key")
    check_nothing_lost(single.await_settled(), ["hangs", *map(str, range(50))])
