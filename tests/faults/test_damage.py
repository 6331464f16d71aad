"""A damaged log of a broker: one byte of a batch was flipped on its disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import EmbeddedKafkas
from tests.integration.job import MakeJob, ask, check_once, error_code
from tests.kafka_probe import KafkaProbe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HEADER = 61
"""Bytes of a batch before its records."""


def batches(log: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield of each batch its first offset, its records, and where it begins and ends in the file."""
    place = 0
    while place + HEADER <= len(log) and (length := int.from_bytes(log[place + 8 : place + 12], "big")) > 0:
        first, count = (
            int.from_bytes(log[place : place + 8], "big"),
            int.from_bytes(log[place + 57 : place + 61], "big"),
        )
        yield first, count, place, place + 12 + length
        place += 12 + length


def test_each_record_of_a_damaged_batch_has_one_error_and_those_around_it_their_answers(
    embedded_kafka: EmbeddedKafkas, make_job: MakeJob, tmp_path: Path
) -> None:
    """The first had errors and dead letters without end where the batch was compressed; else the worker stood still, or
    answered what the flipped byte had made of a request: check sums were not looked at.
    """
    kafka = embedded_kafka(data_dir=tmp_path / "kafka")
    probe = KafkaProbe(kafka.bootstrap_servers)
    job = make_job(probe, partitions=1)
    for first in (0, 50, 100):
        probe.produce(job.requests, [ask(n) for n in range(first, first + 50)], linger_ms=500)
    kafka.stop_broker()
    [path] = [path for path in (tmp_path / "kafka").rglob("*.log") if job.requests in str(path)]
    log = bytearray(path.read_bytes())
    first, count, begin, end = next(found for found in batches(log) if found[0] >= 50)
    log[(begin + HEADER + end) // 2] ^= 0xFF
    path.write_bytes(log)
    kafka.restart()
    job.run_to_end()
    damaged = range(first, first + count)
    intact = [str(n) for n in range(150) if n not in damaged]
    outcomes = job.outcomes()
    check_once(outcomes, [*intact, *(f"{job.requests}/0/{offset}" for offset in damaged)])
    errors = [outcome for outcome in outcomes if outcome.header("status") == b"error"]
    assert [error_code(error) for error in errors] == ["invalid_payload"] * count
    assert count > 1
    assert len(job.dead_letters()) == count
