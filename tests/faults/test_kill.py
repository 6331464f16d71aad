"""Deaths and endings of the whole worker under load: nothing is lost, and only a death may answer twice."""

from __future__ import annotations

import random
import signal

import pytest

from tests.faults.dumps import Watch
from tests.faults.history import Promise
from tests.integration.job import Job, ask, ask_binary, check_once

SIZES = {"batch__max_batch_size": 16, "model__options": {"seconds": 0.002}}


@pytest.mark.parametrize(
    ("kills", "total"), [(1, 6_000), pytest.param(3, 20_000, marks=pytest.mark.long)], ids=["once", "three times"]
)
def test_a_worker_that_is_killed_under_load_loses_nothing(job: Job, kills: int, total: int) -> None:
    job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total))
    with Watch(job, Promise()) as watch:
        for kill in range(1, kills + 1):
            worker = job.start(**SIZES)
            job.await_answered(kill * total // 5)
            worker.kill()
            watch.fault("killed")
        worker = job.start(**SIZES)
        job.await_settled()

    history = watch.verify()
    duplicates = len(history.outcomes) - total
    assert duplicates < total / 2, "it commits so seldom that each death repeats thousands"
    assert history.letters == ()
    assert worker.stop() == 0
    assert job.answered() == total + duplicates


@pytest.mark.parametrize("ends", [1, pytest.param(10, marks=pytest.mark.long)])
def test_sigterm_at_random_moments_answers_every_request_once(job: Job, ends: int) -> None:
    chance = random.Random(11)
    total = 4_000 * (ends + 1)
    job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total))
    with Watch(job, Promise()) as watch:
        for end in range(ends):
            worker = job.start(**SIZES)
            job.await_answered(min(job.answered() + chance.randrange(1, 2_500), total - 500 * (ends - end)))
            assert worker.stop() == 0, worker.text()
            assert worker.events("drained")
        worker = job.start(**SIZES)
        job.await_settled()

    watch.verify()
    assert worker.stop() == 0


def test_a_second_sigterm_ends_the_worker_at_once(job: Job) -> None:
    gate = job.folder / "gate"
    gate.touch()
    worker = job.start(model__options={"gate": str(gate)})
    job.send(ask(n) for n in range(10))
    worker.await_held(10)
    worker.signal(signal.SIGTERM)
    worker.await_event("draining")
    assert worker.get("/livez")[0] == 200
    assert worker.get("/readyz")[1]["reasons"]["phase"] == "the worker is draining"
    worker.signal(signal.SIGTERM)

    assert worker.wait() == 128 + signal.SIGTERM
    assert job.answered() == 0
    assert not any(job.kafka.committed_offsets(job.group, job.requests).values())
    gate.unlink()
    job.run_to_end()
    check_once(job.outcomes(), map(str, range(10)))


def test_a_drain_that_takes_too_long_gives_back_what_is_not_answered(job: Job) -> None:
    gate = job.folder / "gate"
    gate.touch()
    worker = job.start(model__options={"gate": str(gate)}, delivery__drain_timeout_ms=300)
    job.send(ask(n) for n in range(10))
    worker.await_held(10)

    assert worker.stop() == 0
    assert worker.events("drain_timeout")[0]["given_back"] == 10
    assert job.answered() == 0
    assert not any(job.kafka.committed_offsets(job.group, job.requests).values())
