"""An outage that outlasts the session: the worker goes on by itself, and repeats no more than what was under way."""

from __future__ import annotations

import pytest

from tests.conftest import EmbeddedKafkas
from tests.integration.job import MakeJob, ask_binary, check_answers, check_nothing_lost
from tests.kafka_probe import KafkaProbe


@pytest.mark.slow
def test_after_an_outage_the_worker_goes_on_and_repeats_what_was_under_way(
    embedded_kafka: EmbeddedKafkas, make_job: MakeJob
) -> None:
    """A purge of the producer's queue, to repeat less, left it silent: the worker stood still for ever."""
    cluster = embedded_kafka()
    job = make_job(KafkaProbe(cluster.bootstrap_servers))
    total = 20_000
    job.send(map(ask_binary, range(total)))
    worker = job.start(batch__max_batch_size=64, batch__max_queue_size=2048)
    job.await_answered(5_000)

    cluster.kill()
    worker.await_event("partitions_lost")

    worker.await_metric("forebay_queue_requests", 0)
    worker.await_metric("forebay_in_flight_requests", 0)
    sent = worker.metric("forebay_requests_total") + worker.metric("forebay_unacknowledged_outcomes")
    cluster.restart()
    committed = sum(job.kafka.committed_offsets(job.group, job.requests).values())
    worker.await_ready()

    outcomes = job.await_settled()
    duplicates = check_nothing_lost(outcomes, map(str, range(total)))
    check_answers(outcomes)
    print(f"{duplicates} of {total} requests answered twice; {sent - committed:.0f} had been sent above the commits")
    assert duplicates <= sent - committed, "it repeats what was committed, or what it had not sent"
    assert worker.stop() == 0
