"""Kafka's own yardstick, its TransactionsTest: three brokers, bounces of brokers or of workers in three rounds, order.

Two workers copy the input through a model to the output, results in the order of each input partition, while somebody
reads along. Clean bounces are orderly stops, hard ones kill -9. `YARDSTICK_RECORDS` changes the number of records.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.cluster import BROKERS, Cluster, three_brokers
from tests.faults.dumps import Watch
from tests.faults.history import History, Promise
from tests.integration.job import Job, MakeJob, ask_binary

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

RECORDS = int(os.environ.get("YARDSTICK_RECORDS", "100000"))
ROUNDS = 3
ROUND_SECONDS = 30
WORKERS = 2
MODES: dict[str, dict[str, Any]] = {
    "exactly once": {"delivery__guarantee": "exactly_once"},
    "at least once": {"delivery__guarantee": "at_least_once", "delivery__ordering": "partition"},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with three_brokers() as cluster:
        yield cluster


class Bounces:
    """The workers of a run and what happens to them and to the brokers."""

    def __init__(self, cluster: Cluster, job: Job, watch: Watch, mode: dict[str, Any]) -> None:
        self.cluster, self.job, self.watch = cluster, job, watch
        # A batch takes as long as it must for the bounces of a round to fall into its work, whatever its size.
        seconds = 64 * WORKERS * ROUNDS * ROUND_SECONDS / RECORDS
        self._settings = {**mode, "batch__max_batch_size": 64, "model__options": {"seconds": seconds}}
        self._settings["kafka__client"] = {}
        self.workers = [job.start(**self._settings) for _ in range(WORKERS)]

    def brokers(self, hard: bool) -> None:
        """Bounce every broker, one after the other; the next goes when the last is in sync again."""
        for broker in range(BROKERS):
            self.cluster.bounce(broker, hard=hard)
            self.watch.fault(f"broker {broker}", since_start=True)
            self.cluster.await_in_sync(self.job.requests, self.job.results, self.job.dead)

    def clients(self, hard: bool) -> None:
        """Bounce every worker, one after the other."""
        for number, worker in enumerate(self.workers):
            if hard:
                worker.kill()
                self.watch.fault(f"worker {number}", since_start=True)
            else:
                assert worker.stop() == 0, worker.text()
            self.workers[number] = self.job.start(**self._settings)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("hard", [False, True], ids=["clean", "hard"])
@pytest.mark.parametrize("bounced", ["brokers", "clients"])
def test_bounces_in_three_rounds_lose_nothing_and_keep_the_order(
    cluster: Cluster, make_job: MakeJob, bounced: str, hard: bool, mode: dict[str, Any]
) -> None:
    seed = os.getpid()
    chance = random.Random(seed)
    job = make_job(cluster.probe, 4)
    cluster.await_in_sync(job.requests, job.results, job.dead)
    began = time.monotonic()
    promise = Promise(mode["delivery__guarantee"], "partition")
    with Watch(job, promise) as watch:
        bounces = Bounces(cluster, job, watch, mode)
        for number in range(ROUNDS):
            first, end = (RECORDS * round_number // ROUNDS for round_number in (number, number + 1))
            job.send(map(ask_binary, range(first, end)))
            job.await_answered(int(first + (end - first) * chance.uniform(0.2, 0.5)), 600)
            getattr(bounces, bounced)(hard)
        job.await_settled(900)
    history = watch.verify()
    what = f"{'hard' if hard else 'clean'} bounces of {bounced}, {promise.guarantee}, seed {seed}"
    print(f"{what}: {tell(history)}, {time.monotonic() - began:.0f} s")


def tell(history: History) -> str:
    """Say the figures of a run that the checker has passed: order kept, every duplicate with its request's source."""
    visible = [outcome for outcome in history.outcomes if outcome.position not in history.invisible]
    answered = {outcome.header("source") for outcome in visible}
    lost, twice = len(history.inputs) - len(answered), len(visible) - len(answered)
    return f"{len(history.inputs)} records, {lost} lost, {twice} duplicates, order kept"
