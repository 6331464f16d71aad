"""A record that brings worker after worker down ends as poisoned: its attempts travel in the commits' metadata."""

from __future__ import annotations

import pytest

from tests.integration.job import Job, MakeJob, ask, check_answers, check_once, error_code, magic
from tests.kafka_probe import KafkaProbe
from tests.magic import Magic


@pytest.mark.parametrize(
    "guarantee",
    [
        pytest.param("at_least_once", marks=pytest.mark.slow),
        pytest.param("exactly_once", marks=pytest.mark.long),
    ],
)
def test_a_record_that_ends_every_worker_is_poisoned_after_its_attempts_and_its_neighbours_are_answered(
    kafka: KafkaProbe, make_job: MakeJob, guarantee: str
) -> None:
    """It started again with no attempts in each worker, for ever."""
    job: Job = make_job(kafka, partitions=1)
    job.send([ask(0), ask(1), magic("killer", Magic.EXIT), ask(3), ask(4)])
    settings = {
        "delivery__guarantee": guarantee,
        "delivery__transactional_id": job.group,
        "delivery__max_attempts": 2,
        "inference__max_restarts": 0,
        "batch__max_batch_size": 8,
    }
    codes = []
    while not job.is_settled() and len(codes) < 6:
        worker = job.launch(["--until-end"], **settings)
        codes.append(worker.wait(120))
        assert "Traceback" not in worker.text()
    assert codes == [75, 75, 0], job.workers[-1].text()
    outcomes = job.kafka.read_all(job.results, committed_only=True)
    check_once(outcomes, ["0", "1", "3", "4", "killer"])
    [poisoned] = [outcome for outcome in outcomes if outcome.key == b"killer"]
    assert error_code(poisoned) == "poisoned"
    check_answers(outcome for outcome in outcomes if outcome is not poisoned)
    [letter] = job.dead_letters()
    assert letter.header("forebay-attempts") == b"2"
