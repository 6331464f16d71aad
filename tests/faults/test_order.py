"""Results keep their order through a time in which their topic cannot be written, on a real broker."""

from __future__ import annotations

import pytest

from tests.integration.job import MakeJob, ask, check_answers
from tests.kafka_probe import KafkaProbe


@pytest.mark.slow
@pytest.mark.parametrize("ordering", ["partition", "key"])
def test_later_results_wait_for_those_that_the_broker_refused(
    kafka: KafkaProbe, make_job: MakeJob, ordering: str
) -> None:
    job = make_job(kafka, partitions=1)
    kafka.delete_topics(job.results)
    kafka.create_topics({job.results: 1})
    worker = job.start(batch__max_batch_size=8, delivery__ordering=ordering, model__options={"seconds": 0.002})
    job.send(map(ask, range(200)))
    job.await_settled()

    kafka.delete_topics(job.results)
    one_key = [ask(number) for number in range(200, 700)]
    kafka.produce(job.requests, [type(one)(one.value, b"one key", one.headers) for one in one_key])
    assert job.results in worker.await_not_ready()["delivery"]
    kafka.create_topics({job.results: 1})

    outcomes = job.await_settled()
    places = [int((outcome.header("source") or b"").rpartition(b"/")[2]) for outcome in outcomes]
    assert places == list(range(200, 700))
    check_answers(outcomes)
    assert worker.stop() == 0
