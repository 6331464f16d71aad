"""Kafka's own yardstick, its TransactionsTest: three brokers, bounces of brokers or of workers in three rounds, order.

Two workers copy the input through a model to the output, results in the order of each input partition. All of the input
is there when they begin, and a batch takes as long as it must for the bounces to fall into their work. Clean bounces
are orderly stops, hard ones kill -9. `YARDSTICK_RECORDS` changes the number of records, `YARDSTICK_SECONDS` how long
they last.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.cluster import BROKERS, Cluster, reports, three_brokers
from tests.faults.dumps import Watch
from tests.faults.history import History, Promise
from tests.integration.job import Job, MakeJob, ask_binary
from tests.seeds import drawn_seed

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

RECORDS = int(os.environ.get("YARDSTICK_RECORDS", "100000"))
SECONDS = float(os.environ.get("YARDSTICK_SECONDS", "150"))
ROUNDS = 3
WORKERS = 2
BATCH = 64
MODES: dict[str, dict[str, Any]] = {
    "exactly once": {"delivery__guarantee": "exactly_once"},
    "at least once": {"delivery__guarantee": "at_least_once", "delivery__ordering": "partition"},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with three_brokers() as cluster:
        yield cluster


class Bounces:
    """The workers of a run and what happens to them and to the brokers. `busy` bounces had work to disturb."""

    def __init__(self, cluster: Cluster, job: Job, watch: Watch, mode: dict[str, Any]) -> None:
        self.cluster, self.job, self.watch = cluster, job, watch
        seconds = BATCH * WORKERS * SECONDS / RECORDS
        self._settings = {**mode, "batch__max_batch_size": BATCH, "model__options": {"seconds": seconds}}
        self._settings["kafka__client"] = {}
        self.workers = [job.start(**self._settings) for _ in range(WORKERS)]
        self.busy = self.done = 0

    def brokers(self, hard: bool) -> None:
        """Bounce every broker, one after the other; the next goes when the last is in sync again."""
        for broker in range(BROKERS):
            self._count()
            self.cluster.bounce(broker, hard=hard)
            self.watch.fault(f"broker {broker}", since_start=True)
            self.cluster.await_in_sync(self.job.requests, self.job.results, self.job.dead)

    def clients(self, hard: bool) -> None:
        """Bounce every worker, one after the other."""
        for number, worker in enumerate(self.workers):
            self._count()
            if hard:
                worker.kill()
                self.watch.fault(f"worker {number}", since_start=True)
            else:
                assert worker.stop() == 0, worker.text()
            self.workers[number] = self.job.start(**self._settings)

    def _count(self) -> None:
        self.done += 1
        self.busy += not self.job.is_settled()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("hard", [False, True], ids=["clean", "hard"])
@pytest.mark.parametrize("bounced", ["brokers", "clients"])
def test_bounces_in_three_rounds_lose_nothing_and_keep_the_order(
    cluster: Cluster, make_job: MakeJob, bounced: str, hard: bool, mode: dict[str, Any]
) -> None:
    chance = random.Random(drawn_seed())
    job = make_job(cluster.probe, 4)
    cluster.await_in_sync(job.requests, job.results, job.dead)
    job.kafka.produce(job.requests, map(ask_binary, range(RECORDS)), enable_idempotence=True)
    began = time.monotonic()
    promise = Promise(mode["delivery__guarantee"], "partition")
    with Watch(job, promise) as watch:
        bounces = Bounces(cluster, job, watch, mode)
        for _ in range(ROUNDS):
            job.await_answered(min(job.answered() + int(RECORDS * chance.uniform(0.02, 0.08)), RECORDS), 600)
            getattr(bounces, bounced)(hard)
        job.await_settled(900)
        took = time.monotonic() - began
    history = watch.verify(workers=reports(job))
    what = f"{'hard' if hard else 'clean'} bounces of {bounced}, {promise.guarantee}"
    disturbed = f"{bounces.busy} of {bounces.done} bounces under load"
    print(f"{what}: {tell(history)}, {disturbed}, {took:.0f} s")
    assert bounces.busy, "the work was over before the first bounce"
    for worker in bounces.workers:
        assert worker.stop() == 0, worker.text()


def tell(history: History) -> str:
    """Say the figures of a run that the checker has passed: order kept, every duplicate with its request's source."""
    visible = [outcome for outcome in history.outcomes if outcome.position not in history.invisible]
    answered = {outcome.header("source") for outcome in visible}
    lost, twice = len(history.inputs) - len(answered), len(visible) - len(answered)
    hidden = len(history.outcomes) - len(visible)
    return f"{len(history.inputs)} records, {lost} lost, {twice} duplicates, {hidden} aborted, order kept"
