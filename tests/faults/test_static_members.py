"""Static members: a worker that restarts within the session time-out gets its partitions back and disturbs nobody."""

from __future__ import annotations

import pytest

from tests.integration.job import QUICK, MakeJob, ask, check_answers, check_once
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import KafkaProbe


def client(name: str) -> dict[str, object]:
    return {**QUICK, "session.timeout.ms": 30_000, "group.instance.id": name}


@pytest.mark.slow
def test_a_rolling_restart_of_static_members_moves_no_partition_and_answers_once(
    kafka: KafkaProbe, make_job: MakeJob
) -> None:
    job = make_job(kafka, partitions=4)
    total = 6_000
    sizes = {"batch__max_batch_size": 16, "model__options": {"seconds": 0.02}}

    def start(name: str) -> WorkerProcess:
        return job.start(**sizes, kafka__client=client(name))

    first, second = start("one"), start("two")
    first.await_metric("forebay_partitions_assigned", 2)
    second.await_metric("forebay_partitions_assigned", 2)
    assigned = len(second.events("partitions_assigned"))
    job.send(map(ask, range(total)))
    job.await_answered(500)
    seconds = second.events("partitions_assigned")[-1]["partitions"]
    firsts = {f"{job.requests}/{number}" for number in range(4)} - set(seconds)

    assert first.stop() == 0
    again = start("one")
    again.await_metric("forebay_partitions_assigned", 2)
    job.await_answered(job.answered() + 300)
    assert set(again.events("partitions_assigned")[-1]["partitions"]) == firsts
    assert len(second.events("partitions_assigned")) == assigned
    assert second.events("partitions_revoked") == []

    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(total)))
    check_answers(outcomes)
