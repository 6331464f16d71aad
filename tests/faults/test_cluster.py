"""Three brokers, of which one stops, dies, freezes, or is missing: leaders and coordinators move, and nothing is lost.

One cluster for all of it, and requests as long as it lasts. Every run is checked whole; the figures are printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.faults.cluster import BROKERS, TRANSACTIONS, Cluster, Load, await_more, reports, three_brokers
from tests.faults.dumps import Watch
from tests.faults.history import History, Promise
from tests.integration.job import Job, MakeJob
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SIZES = {"batch__max_batch_size": 16, "model__options": {"seconds": 0.02}}
TRANSACTION_MS = 6_000
MODES: dict[str, dict[str, Any]] = {
    "at least once": {"delivery__guarantee": "at_least_once"},
    "exactly once": {"delivery__guarantee": "exactly_once", "delivery__transaction_timeout_ms": TRANSACTION_MS},
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())

Hurt = Callable[[Watch, WorkerProcess], None]
Away = Callable[[Cluster, Job, Watch, Callable[[], int]], None]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with three_brokers() as cluster:
        yield cluster


@pytest.fixture
def job(cluster: Cluster, make_job: MakeJob) -> Job:
    """A job whose topics, like everything else, are in sync on all brokers before it begins."""
    job = make_job(cluster.probe, 4)
    cluster.await_in_sync(job.requests, job.results, job.dead)
    return job


def run(job: Job, mode: dict[str, Any], hurt: Hurt) -> History:
    """Run one worker under load through what `hurt` does to the brokers, to the end; check all of it."""
    with Watch(job, Promise(mode["delivery__guarantee"])) as watch:
        worker = job.start(**SIZES, **mode)
        with Load(job):
            await_more(job, 500)
            hurt(watch, worker)
            await_more(job, 500)
        job.await_settled(300)
        worker.await_ready()
    history = watch.verify(workers=reports(job))
    tell(history, worker)
    assert worker.stop() == 0, worker.text()
    return history


def tell(history: History, worker: WorkerProcess) -> None:
    """Print what it cost."""
    visible = sum(outcome.position not in history.invisible for outcome in history.outcomes)
    hidden = len(history.outcomes) - visible
    lost = sum(len(event["partitions"]) for event in worker.events("partitions_lost"))
    rewound = len(worker.events("partitions_rewound"))
    print(
        f"{visible - len(history.inputs)} of {len(history.inputs)} requests answered twice; "
        f"{hidden} outcomes aborted; {lost} partitions lost; {rewound} times read again"
    )


def lose(cluster: Cluster, job: Job, watch: Watch, find: Callable[[], int]) -> None:
    """Kill the broker that `find` names; go on without it, until another has its place; bring it back."""
    first = find()
    cluster.kafka.kill(first)
    try:
        eventually(lambda: find() != first, "another broker has its place", 60, 0.5)
        await_more(job, 1_500)
    finally:
        cluster.kafka.restart(first)
    watch.fault("a broker died", since_start=True)


def freeze(cluster: Cluster, job: Job, watch: Watch, find: Callable[[], int]) -> None:
    """Do the same with one that stays connected, answers nothing, and wakes later with what it took before."""
    first = find()
    cluster.kafka.pause(first)
    try:
        eventually(lambda: find() != first, "another broker has its place", 60, 0.5)
        await_more(job, 1_500)
    finally:
        with watch.blind():
            cluster.kafka.resume(first)
            cluster.await_in_sync(job.requests, job.results, job.dead)
    watch.fault("a broker froze", since_start=True)


@every_mode
@pytest.mark.parametrize("hard", [False, True], ids=["stops", "dies"])
def test_each_broker_in_turn_goes_and_comes_back(cluster: Cluster, job: Job, mode: dict[str, Any], hard: bool) -> None:
    def hurt(watch: Watch, _: WorkerProcess) -> None:
        for broker in range(BROKERS):
            cluster.bounce(broker, hard=hard)
            watch.fault(f"broker {broker}", since_start=True)
            cluster.await_in_sync(job.requests, job.results, job.dead)

    run(job, mode, hurt)


@every_mode
@pytest.mark.parametrize("away", [lose, freeze], ids=["dies", "freezes"])
def test_the_coordinator_of_the_group_is_lost(cluster: Cluster, job: Job, away: Away, mode: dict[str, Any]) -> None:
    run(job, mode, lambda watch, _: away(cluster, job, watch, lambda: cluster.coordinator(job.group)))


@pytest.mark.parametrize("away", [lose, freeze], ids=["dies", "freezes"])
def test_the_coordinator_of_the_transactions_is_lost(cluster: Cluster, job: Job, away: Away) -> None:
    own = f"id-of-{job.group}"
    mode = {**MODES["exactly once"], "delivery__transactional_id": own}
    run(job, mode, lambda watch, _: away(cluster, job, watch, lambda: cluster.coordinator(own, TRANSACTIONS)))


@every_mode
@pytest.mark.parametrize("away", [lose, freeze], ids=["dies", "freezes"])
@pytest.mark.parametrize("side", ["requests", "results"])
def test_the_leader_of_a_partition_is_lost(
    cluster: Cluster, job: Job, side: str, away: Away, mode: dict[str, Any]
) -> None:
    run(job, mode, lambda watch, _: away(cluster, job, watch, lambda: cluster.leader(getattr(job, side))))


@every_mode
def test_too_few_replicas_hold_everything_up_and_nothing_is_committed_until_they_are_back(
    cluster: Cluster, make_job: MakeJob, mode: dict[str, Any]
) -> None:
    """Three must be in sync and two are: the brokers refuse every outcome for now, whatever the worker does."""
    job = make_job(cluster.probe, 4)
    strict = make_job(cluster.probe, 1, min_insync_replicas=BROKERS)
    cluster.await_in_sync(job.requests, job.dead, strict.results)
    job.results = strict.results

    def hurt(watch: Watch, worker: WorkerProcess) -> None:
        away = next(broker for broker in range(BROKERS) if broker != cluster.coordinator(job.group))
        cluster.kafka.kill(away)
        eventually(lambda: "delivery" in worker.await_not_ready(), "the worker says that it delivers nothing", 90)
        before = job.kafka.committed_offsets(job.group, job.requests)
        time.sleep(TRANSACTION_MS / 1000)
        assert job.kafka.committed_offsets(job.group, job.requests) == before
        cluster.kafka.restart(away)
        watch.fault("too few replicas", since_start=True)
        worker.await_ready()

    run(job, mode, hurt)
