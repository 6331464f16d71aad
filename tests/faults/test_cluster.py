"""Three brokers, of which one after the other stops or dies: leaders and coordinators move, and nothing is lost.

One cluster for all of it. Every run is checked whole; the figures are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.faults.cluster import BROKERS, Cluster, three_brokers
from tests.faults.dumps import Watch
from tests.faults.history import History, Promise
from tests.integration.job import Job, MakeJob, ask, ask_binary
from tests.integration.worker_process import WorkerProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

TOTAL = 20_000
SIZES = {"batch__max_batch_size": 16, "model__options": {"seconds": 0.008}}
MODES: dict[str, dict[str, Any]] = {
    "at least once": {"delivery__guarantee": "at_least_once"},
    "exactly once": {"delivery__guarantee": "exactly_once", "delivery__transaction_timeout_ms": 6000},
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with three_brokers() as cluster:
        yield cluster


@pytest.fixture
def job(cluster: Cluster, make_job: MakeJob) -> Job:
    """A job with its requests; all brokers are up and in sync before it begins."""
    job = make_job(cluster.probe, 4)
    cluster.await_in_sync(job.requests, job.results, job.dead)
    job.send(ask(n) if n % 2 else ask_binary(n) for n in range(TOTAL))
    return job


def run(job: Job, mode: dict[str, Any], hurt: Callable[[Watch, WorkerProcess], None]) -> History:
    """Run one worker through what `hurt` does to the brokers, to the end; check all of it."""
    with Watch(job, Promise(mode["delivery__guarantee"])) as watch:
        worker = job.start(**SIZES, **mode)
        job.await_answered(1_000)
        hurt(watch, worker)
        job.await_settled(300)
    history = watch.verify()
    visible = sum(outcome.position not in history.invisible for outcome in history.outcomes)
    lost = sum(len(event["partitions"]) for event in worker.events("partitions_lost"))
    print(f"{visible - TOTAL} of {TOTAL} requests answered twice; {lost} partitions lost")
    assert worker.stop() == 0, worker.text()
    return history


@every_mode
@pytest.mark.parametrize("hard", [False, True], ids=["stops", "dies"])
def test_each_broker_in_turn_goes_and_comes_back(cluster: Cluster, job: Job, mode: dict[str, Any], hard: bool) -> None:
    def hurt(watch: Watch, _: WorkerProcess) -> None:
        for broker in range(BROKERS):
            cluster.bounce(broker, hard=hard)
            watch.fault(f"broker {broker}", since_start=True)
            cluster.await_in_sync(job.requests, job.results, job.dead)

    run(job, mode, hurt)
