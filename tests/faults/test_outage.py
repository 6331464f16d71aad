"""An outage that outlasts the session: what had not been sent is dropped, for its partitions will be read again."""

from __future__ import annotations

import pytest

from tests.conftest import EmbeddedKafkas
from tests.integration.job import MakeJob, ask_binary, check_answers, check_nothing_lost
from tests.kafka_probe import KafkaProbe, eventually


@pytest.mark.slow
def test_an_outage_does_not_repeat_the_whole_queue(embedded_kafka: EmbeddedKafkas, make_job: MakeJob) -> None:
    """The client once kept 6,000 outcomes of partitions that it had lost, and sent all of them afterwards."""
    cluster = embedded_kafka()
    job = make_job(KafkaProbe(cluster.bootstrap_servers))
    total = 20_000
    job.send(map(ask_binary, range(total)))
    worker = job.start(batch__max_batch_size=64, batch__max_queue_size=2048)
    job.await_answered(5_000)

    cluster.kill()
    worker.await_event("partitions_lost")

    def held() -> float:
        return worker.metric("forebay_unacknowledged_outcomes")

    eventually(lambda: held() < 500, "what was not sent is dropped", 60)
    cluster.restart()
    worker.await_ready()

    outcomes = job.await_settled()
    duplicates = check_nothing_lost(outcomes, map(str, range(total)))
    check_answers(outcomes)
    assert duplicates < 3_000, "it sent what the next owner sends, too"
    assert worker.stop() == 0
