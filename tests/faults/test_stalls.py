"""An interpreter that stands still for longer than a session: native code of a model in the loop's own process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.dumps import Watch
from tests.faults.history import Promise
from tests.faults.stalling import STALL
from tests.integration.job import MakeJob, ask
from tests.kafka_probe import KafkaProbe

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_a_stall_longer_than_the_session_costs_time_and_no_membership(
    kafka: KafkaProbe, make_job: MakeJob, guarantee: Any
) -> None:
    """The client's own threads keep the membership; with a process for each replica the loop notices nothing."""
    job = make_job(kafka)
    settings = {"model__factory": "tests.faults.stalling:Stalling", "model__options": {"stall": 8}}
    settings |= {"inference__executor": "thread", "delivery__guarantee": guarantee}
    with Watch(job, Promise(guarantee)) as watch:
        worker = job.start(**settings)
        job.send(ask(n) for n in range(2_000) if n != STALL - 1)
        job.await_answered(200)
        job.send([ask(STALL - 1), *(ask(n) for n in range(2_000, 3_000))])
        job.await_settled(120)
        worker.await_ready()
        assert worker.metric("forebay_rebalances_total", kind="lost") == 0
    history = watch.verify()
    assert sum(outcome.position not in history.invisible for outcome in history.outcomes) == 3_000
    assert worker.stop() == 0
