"""Exactly-once mode on real Kafka: one visible outcome per record, through kills and through what callers get wrong."""

from __future__ import annotations

import struct

import pytest

from tests.faults.checker import verify
from tests.faults.dumps import Watch, dump
from tests.faults.history import Promise
from tests.integration.job import Job, MakeJob, ask, error_code, magic
from tests.kafka_probe import KafkaProbe, Send

EXACTLY_ONCE = {"delivery__guarantee": "exactly_once", "delivery__transaction_timeout_ms": 6000}


def _visible(job: Job) -> list:
    return job.kafka.read_all(job.results, committed_only=True)


def test_killed_workers_leave_one_visible_outcome_per_record_in_the_order_of_the_input(job: Job) -> None:
    total = 6000
    job.send(ask(number) for number in range(1, total + 1))
    changes = {**EXACTLY_ONCE, "model__options": {"seconds": 0.004}}
    with Watch(job, Promise("exactly_once")) as watch:
        for share in (0.2, 0.5):
            worker = job.start(**changes)
            job.await_answered(int(total * share))
            worker.kill()
            watch.fault("killed")
        job.run_to_end(**changes)
    watch.verify()


def test_a_poison_row_has_its_error_and_its_dead_letter_in_the_same_transaction(job: Job) -> None:
    job.send([ask(1), magic("poison", -1), ask(2), Send(b"{", b"broken"), ask(3)])
    job.run_to_end(**EXACTLY_ONCE)
    outcomes = {outcome.key: outcome for outcome in _visible(job)}
    assert sorted(outcomes) == [b"1", b"2", b"3", b"broken", b"poison"]
    assert error_code(outcomes[b"poison"]) == "model_error"
    assert {letter.key for letter in job.kafka.read_all(job.dead, committed_only=True)} == {b"poison", b"broken"}
    verify(dump(job, Promise("exactly_once")))


@pytest.mark.parametrize(
    ("topic", "partition"),
    [(b"reply.nope", None), (b"reply./bad", None), (None, 99)],
    ids=["no such topic", "no topic's name", "no such partition"],
)
def test_a_reply_address_that_does_not_exist_holds_up_nobody(
    job: Job, topic: bytes | None, partition: int | None
) -> None:
    """A caller's bad address made every transaction fail, for ever, with all that was in it."""
    headers: list[tuple[str, bytes | None]] = [("kafka_replyTopic", topic or job.dead.encode())]
    if partition is not None:
        headers.append(("kafka_replyPartition", struct.pack(">i", partition)))
    job.send([ask(1), ask(2, headers=headers), ask(3)])
    job.run_to_end(**EXACTLY_ONCE, kafka__reply_topics=[r"reply\..*", job.dead])
    outcomes = {outcome.key: outcome for outcome in _visible(job)}
    if topic is None:
        assert set(outcomes) == {b"1", b"3"}
        assert [reply.key for reply in job.kafka.read_all(job.dead, committed_only=True)] == [b"2"]
    else:
        assert set(outcomes) == {b"1", b"2", b"3"}
        assert error_code(outcomes[b"2"]) == "reply_not_allowed"
    assert job.is_settled() or topic is not None


def test_a_result_that_its_topic_does_not_take_becomes_an_error_once(kafka: KafkaProbe, make_job: MakeJob) -> None:
    job = make_job(kafka)
    small = f"{job.results}.small"
    kafka.create_topics({small: 1}, **{"max.message.bytes": "20000"})
    sizes = (10, 200_000, 20)
    try:
        job.send(
            Send(
                b'{"id": "%d", "inputs": [{"name": "size", "shape": [1], "datatype": "INT64", "data": [%d]}]}'
                % (size, size),
                headers=[("kafka_replyTopic", small.encode())],
            )
            for size in sizes
        )
        job.run_to_end(**EXACTLY_ONCE, model__factory="tests.models:Growing", kafka__reply_topics=[small])
        replies = {reply.key: reply for reply in kafka.read_all(small, committed_only=True)}
        assert set(replies) == {b"10", b"200000", b"20"}
        assert error_code(replies[b"200000"]) == "result_too_large"
    finally:
        kafka.delete_topics(small)
