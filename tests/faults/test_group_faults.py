"""Two workers with one transactional id, what retention has deleted, records without a value: on one real broker."""

from __future__ import annotations

from dataclasses import replace

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient  # type: ignore[attr-defined]

from tests.faults.checker import verify
from tests.faults.dumps import Watch, dump, report
from tests.faults.history import Promise
from tests.integration.job import Job, MakeJob, ask, ask_binary
from tests.kafka_probe import KafkaProbe, Send

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SIZES = {"batch__max_batch_size": 16, "model__options": {"seconds": 0.005}}


def test_the_older_of_two_workers_with_one_transactional_id_ends_with_a_sentence(job: Job) -> None:
    mode = {"delivery__guarantee": "exactly_once", "delivery__transactional_id": f"one-for-both-{job.group}"}
    total = 3_000
    with Watch(job, Promise("exactly_once")) as watch:
        older = job.start(**SIZES, **mode)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total))
        job.await_answered(200)
        younger = job.start(**SIZES, **mode)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total, 2 * total))
        assert older.wait() == 70, older.text()
        job.await_settled(300)
    text = older.text()
    assert "has fenced this one" in text
    assert "give each worker its own delivery.transactional_id" in text
    assert "Traceback" not in text
    first, second = map(report, job.workers)
    watch.verify(workers=(replace(first, allowed_codes=frozenset({70})), second))
    assert younger.stop() == 0


def test_what_retention_has_deleted_is_passed_where_the_settings_say_so_and_stops_the_worker_otherwise(
    kafka: KafkaProbe, make_job: MakeJob
) -> None:
    job = make_job(kafka, partitions=1)
    job.send(map(ask, range(100)))
    job.run_to_end()
    job.send(map(ask, range(100, 300)))
    admin = AdminClient(kafka.config)
    for future in admin.delete_records([TopicPartition(job.requests, 0, 250)]).values():
        future.result(30)
    strict = job.launch(kafka__auto_offset_reset="error")
    assert strict.wait() == 78, strict.text()
    assert "set kafka.auto_offset_reset to earliest or latest" in strict.text()
    job.run_to_end()
    answered = sorted(int(outcome.key or b"") for outcome in job.outcomes())
    assert answered == [*range(100), *range(250, 300)]


def test_records_without_a_value_have_their_error_and_hold_up_nothing(job: Job) -> None:
    """Tombstones of a compacted topic."""
    job.send(Send(None, b"gone-%d" % n) if n % 3 == 0 else ask(n) for n in range(300))
    job.run_to_end()
    history = dump(job, Promise())
    verify(history)
    assert len(history.letters) == 100
