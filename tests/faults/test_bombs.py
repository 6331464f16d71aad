"""Batches of records that are small and decompress to hundreds of megabytes."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from tests.integration.job import Job, MakeJob, ask, check_once, error_code
from tests.kafka_probe import KafkaProbe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MEBIBYTE = 1_048_576


def bomb(kafka: KafkaProbe, topic: str, codec: str, size: int) -> None:
    """Publish one record of zeros; below a megabyte on its way and at the broker."""
    producer = Producer({**kafka.config, "compression.type": codec, "message.max.bytes": 1_000_000_000})
    refused: list[str] = []
    producer.produce(topic, bytes(size), b"bomb", on_delivery=lambda error, _: refused.append(str(error)))
    assert producer.flush(60) == 0
    assert refused == ["None"]


def test_bombs_have_their_errors_and_their_neighbours_their_answers(kafka: KafkaProbe, make_job: MakeJob) -> None:
    """The client unpacks gzip without a bound, and refuses zstd that becomes more than 100 MB."""
    job: Job = make_job(kafka, partitions=1)
    job.send(ask(n) for n in range(100))
    bomb(kafka, job.requests, "gzip", 120 * MEBIBYTE)
    bomb(kafka, job.requests, "zstd", 300 * MEBIBYTE)
    job.send(ask(n) for n in range(100, 200))
    job.run_to_end()
    outcomes = job.outcomes()
    errors = {outcome.key: error_code(outcome) for outcome in outcomes if outcome.header("status") == b"error"}
    place = f"{job.requests}/0/101".encode()
    assert errors == {b"bomb": "too_large", place: "invalid_payload"}
    check_once(outcomes, [*map(str, range(200)), "bomb", place.decode()])
    assert len(job.dead_letters()) == 2


def test_each_record_of_a_batch_that_becomes_too_large_has_one_error(kafka: KafkaProbe, make_job: MakeJob) -> None:
    """Their first had errors and dead letters without end, thousands a second, and nothing behind was answered."""
    job = make_job(kafka, partitions=1)
    job.send(ask(n) for n in range(10))
    kafka.produce(
        job.requests, [bytes(4 * MEBIBYTE)] * 40, compression_type="zstd", linger_ms=500, batch_size=500_000_000
    )
    job.send(ask(n) for n in range(10, 20))
    job.run_to_end()
    damaged = [f"{job.requests}/0/{offset}" for offset in range(10, 50)]
    outcomes = job.outcomes()
    check_once(outcomes, [*map(str, range(20)), *damaged])
    assert {error_code(outcome) for outcome in outcomes if (outcome.key or b"").decode() in damaged} == {
        "invalid_payload"
    }
    assert len(job.dead_letters()) == 40


def test_a_topic_that_keeps_zstd_bounds_what_a_bomb_of_any_codec_takes(kafka: KafkaProbe, make_job: MakeJob) -> None:
    """The mend for who cannot trust producers: the broker packs anew, and the client refuses what becomes too large."""
    job = make_job(kafka, partitions=1, compression_type="zstd")
    job.send(ask(n) for n in range(10))
    bomb(kafka, job.requests, "gzip", 200 * MEBIBYTE)
    job.send(ask(n) for n in range(10, 20))
    job.run_to_end()
    outcomes = job.outcomes()
    [error] = [outcome for outcome in outcomes if outcome.header("status") == b"error"]
    assert error_code(error) == "invalid_payload"
    assert len(outcomes) == 21
