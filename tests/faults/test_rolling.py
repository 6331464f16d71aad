"""Orderly endings under load: rolling restarts of four workers, and SIGTERM at fifty random moments."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.faults.dumps import Watch
from tests.faults.history import Promise
from tests.faults.tally import recomputed
from tests.integration.job import QUICK, Job, MakeJob, ask, ask_binary
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import KafkaProbe
from tests.seeds import drawn_seed

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

WORKERS = 4
BATCH = 16
MODES: dict[str, dict[str, Any]] = {
    "at least once": {"delivery__guarantee": "at_least_once"},
    "exactly once": {"delivery__guarantee": "exactly_once"},
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


@every_mode
@pytest.mark.parametrize("membership", ["dynamic", "static"])
def test_a_rolling_restart_of_four_workers_under_load_answers_once_and_recomputes_next_to_nothing(
    kafka: KafkaProbe, make_job: MakeJob, membership: str, mode: dict[str, Any]
) -> None:
    job = make_job(kafka, partitions=8)
    tally = job.folder / "tally"
    total = 24_000

    def start(number: int) -> WorkerProcess:
        static = {"session.timeout.ms": 30_000, "group.instance.id": f"worker-{number}"}
        return job.start(
            **mode,
            model__factory="tests.faults.tally:Tally",
            model__options={"tally": str(tally), "seconds": 0.15},
            batch__max_batch_size=BATCH,
            kafka__client={**QUICK, **(static if membership == "static" else {})},
        )

    with Watch(job, Promise(mode["delivery__guarantee"])) as watch:
        workers = [start(number) for number in range(WORKERS)]
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total))
        job.await_answered(500)
        for number in range(WORKERS):
            assert workers[number].stop() == 0, workers[number].text()
            workers[number] = start(number)
            job.await_answered(job.answered() + 500)
        assert not job.is_settled(), "the load was over before the restarts were"
        job.await_settled(300)
    history = watch.verify()
    again = recomputed(tally, total)
    visible = sum(outcome.position not in history.invisible for outcome in history.outcomes)
    print(f"{membership}: {visible - total} duplicates, {again} rows recomputed in {WORKERS} restarts")
    assert again <= WORKERS * BATCH, f"{again} rows were run twice"


@every_mode
def test_sigterm_at_fifty_random_moments_ends_with_0_and_repeats_nothing(job: Job, mode: dict[str, Any]) -> None:
    """Each drains within its grace: none of them gives anything back because its time was over."""
    chance = random.Random(drawn_seed())
    ends, wave = 50, 1_200
    sizes = {"batch__max_batch_size": BATCH, "model__options": {"seconds": 0.005}}
    with Watch(job, Promise(mode["delivery__guarantee"])) as watch:
        for end in range(ends):
            job.send(ask(n) if n % 2 else ask_binary(n) for n in range(end * wave, (end + 1) * wave))
            worker = job.start(**mode, **sizes)
            time.sleep(chance.uniform(0, 0.6))
            assert worker.stop() == 0, worker.text()
            assert worker.events("drained")
            assert not worker.events("drain_timeout")
        worker = job.start(**mode, **sizes)
        job.await_settled(300)
    history = watch.verify()
    visible = sum(outcome.position not in history.invisible for outcome in history.outcomes)
    print(f"{ends} endings, {visible - ends * wave} duplicates among {ends * wave} requests")
    assert worker.stop() == 0
