"""What happens to the group and its rights while workers work, on one real broker; checked whole.

A storm of members, lost rights, two workers with one transactional id, records without a value.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Consumer

from tests.faults.checker import verify
from tests.faults.dumps import Watch, dump, report
from tests.faults.history import Promise
from tests.faults.tally import recomputed
from tests.integration.gate import Gate, gate, listeners
from tests.integration.job import QUICK, Job, MakeJob, ask, ask_binary
from tests.kafka_probe import KafkaProbe, Send
from tests.seeds import drawn_seed

__all__ = ["gate", "listeners"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SIZES = {"batch__max_batch_size": 16, "model__options": {"seconds": 0.005}}
MODES: dict[str, dict[str, Any]] = {
    "at least once": {"delivery__guarantee": "at_least_once"},
    "exactly once": {"delivery__guarantee": "exactly_once"},
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


PATIENT = {**QUICK, "session.timeout.ms": 30_000}
"""Nobody is expelled because the machine is busy: all come and go in order."""


def passers_by(job: Job, chance: random.Random, seconds: float) -> Iterator[int]:
    """Let members join the group and leave it in order, up to four at a time; they hold partitions and read nothing.

    Yields how many have joined so far.
    """
    config = {**job.kafka.config, **PATIENT, "group.id": job.group, "enable.auto.commit": False}
    config["partition.assignment.strategy"] = "cooperative-sticky"
    members: list[Consumer] = []
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        if len(members) < 4 and (not members or chance.random() < 0.5):
            members.append(Consumer(config))
            members[-1].subscribe([job.requests])
            count += 1
        else:
            members.pop(chance.randrange(len(members))).close()
        until = time.monotonic() + chance.uniform(0.1, 1.5)
        while time.monotonic() < until:
            for member in members:
                member.pause(member.assignment())
                member.poll(0.02)
        yield count
    for member in members:
        member.close()


@every_mode
def test_a_storm_of_members_that_come_and_go_repeats_nothing(
    kafka: KafkaProbe, make_job: MakeJob, mode: dict[str, Any]
) -> None:
    job = make_job(kafka, partitions=8)
    seed, tally = drawn_seed(), job.folder / "tally"
    settings = {**mode, "batch__max_batch_size": 16, "model__factory": "tests.faults.tally:Tally"}
    settings |= {"kafka__client": PATIENT, "delivery__revoke_timeout_ms": 30_000}
    settings["model__options"] = {"tally": str(tally), "seconds": 0.02}
    total = came = 0
    with Watch(job, Promise(mode["delivery__guarantee"])) as watch:
        workers = [worker.await_ready() for worker in [job.launch(**settings) for _ in range(2)]]
        for number in passers_by(job, random.Random(seed), 60):
            came = number
            total += job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total, total + 200))
        job.await_settled(300)
    history = watch.verify()
    rebalances = sum(worker.metric("forebay_rebalances_total") for worker in workers)
    visible = sum(outcome.position not in history.invisible for outcome in history.outcomes)
    print(
        f"{came} members came and went, {rebalances:.0f} changes of assignments, {visible - total} "
        f"duplicates, {recomputed(tally, total)} of {total} rows run twice"
    )
    assert visible == total


@every_mode
@pytest.mark.parametrize("closed", ["results", "requests", "group"])
def test_rights_that_are_lost_hold_everything_up_until_they_are_back(
    gate: Gate, make_job: MakeJob, mode: dict[str, Any], closed: str
) -> None:
    job = make_job(gate.probe)
    total = 4_000
    with Watch(job, Promise(mode["delivery__guarantee"])) as watch:
        worker = job.start(**SIZES, **mode)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total // 2))
        job.await_answered(200)
        gate.add("group" if closed == "group" else "topic", getattr(job, closed), "User:somebody-else", "ALL")
        reasons = worker.await_not_ready()
        print(closed, reasons)
        assert worker.process.poll() is None
        gate.open_to_all()
        watch.fault("rights were lost", since_start=True)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total // 2, total))
        job.await_settled(300)
        worker.await_ready()
    history = watch.verify()
    visible = sum(outcome.position not in history.invisible for outcome in history.outcomes)
    print(f"{visible - total} of {total} twice")
    assert worker.stop() == 0


def test_a_lost_right_to_the_transactional_id_holds_everything_up_until_it_is_back(
    gate: Gate, make_job: MakeJob
) -> None:
    """It used to end the worker with 70."""
    job = make_job(gate.probe)
    mode = {
        **MODES["exactly once"],
        "delivery__transactional_id": f"id-{job.group}",
        "delivery__drain_timeout_ms": 2_000,
    }
    total = 4_000
    with Watch(job, Promise("exactly_once")) as watch:
        worker = job.start(**SIZES, **mode)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total // 2))
        job.await_answered(200)
        gate.add("transactional-id", f"id-{job.group}", "User:somebody-else", "ALL")
        reasons = worker.await_not_ready()
        assert "grant Write on this transactional id, as forebay acls says" in reasons["delivery"]
        assert worker.await_event("not_ready")["delivery"]
        gate.open_to_all()
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total // 2, total))
        job.await_settled(300)
        worker.await_ready()
    watch.verify()
    worker.await_event("ready_again")

    gate.add("transactional-id", f"id-{job.group}", "User:somebody-else", "ALL")
    job.send([ask(total)])
    worker.await_not_ready()
    assert worker.stop() == 0
    assert "Traceback" not in worker.text()
    assert not job.is_settled()
    gate.open_to_all()


def test_the_older_of_two_workers_with_one_transactional_id_ends_with_a_sentence(job: Job) -> None:
    mode = {"delivery__guarantee": "exactly_once", "delivery__transactional_id": f"one-for-both-{job.group}"}
    total = 3_000
    with Watch(job, Promise("exactly_once")) as watch:
        older = job.start(**SIZES, **mode)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total))
        job.await_answered(200)
        younger = job.start(**SIZES, **mode)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total, 2 * total))
        assert older.wait() == 70, older.text()
        job.await_settled(300)
    text = older.text()
    assert "has fenced this one" in text
    assert "give each worker its own delivery.transactional_id" in text
    assert "Traceback" not in text
    first, second = map(report, job.workers)
    watch.verify(workers=(replace(first, allowed_codes=frozenset({70})), second))
    assert younger.stop() == 0


def test_records_without_a_value_have_their_error_and_hold_up_nothing(job: Job) -> None:
    """Tombstones of a compacted topic."""
    job.send(Send(None, b"gone-%d" % n) if n % 3 == 0 else ask(n) for n in range(300))
    job.run_to_end()
    history = dump(job, Promise())
    verify(history)
    assert len(history.letters) == 100
