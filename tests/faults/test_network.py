"""The network between a worker and its broker fails: connections hang, break, are slow, or lose one answer for a while.

The broker advertises the port of a proxy, through which everything goes and which can tell a worker's producer from its
consumer. All checked whole.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from forebay.broker import free_port
from tests.conftest import EmbeddedKafkas
from tests.faults import proxy as network
from tests.faults.dumps import Watch, report
from tests.faults.history import History, Promise
from tests.faults.proxy import HOST, Proxy
from tests.integration.job import Job, MakeJob, ask, ask_binary
from tests.kafka_probe import KafkaProbe, eventually
from tests.seeds import drawn_seed

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TOTAL = 12_000
SIZES = {"batch__max_batch_size": 64, "model__options": {"seconds": 0.016}}
EXPELLED_SECONDS = 5.0
"""Longer than the session of `QUICK`, by what a broker needs to notice."""
MODES: dict[str, dict[str, Any]] = {
    "at least once": {"delivery__guarantee": "at_least_once"},
    "exactly once": {"delivery__guarantee": "exactly_once", "delivery__transaction_timeout_ms": 4000},
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


@pytest.fixture
def proxy(embedded_kafka: EmbeddedKafkas) -> Iterator[Proxy]:
    """A broker that clients reach through a proxy alone."""
    port = free_port()
    proxy = Proxy(port).start()
    embedded_kafka(port=port, properties={"advertised.listeners": f"PLAINTEXT://{HOST}:{proxy.port}"})
    yield proxy
    proxy.stop()


@pytest.fixture
def job(proxy: Proxy, make_job: MakeJob) -> Job:
    """A job behind the proxy, with its requests."""
    job = make_job(KafkaProbe(f"{HOST}:{proxy.port}"))
    job.send(ask(n) if n % 2 else ask_binary(n) for n in range(TOTAL))
    return job


def promise_of(mode: dict[str, Any]) -> Promise:
    return Promise(mode["delivery__guarantee"])


def repeated(history: History) -> int:
    """Print and return how many requests were answered more than once."""
    visible = sum(outcome.position not in history.invisible for outcome in history.outcomes)
    print(f"{visible - TOTAL} of {TOTAL} requests answered twice")
    return visible - TOTAL


def committed_at_rest(job: Job) -> dict[tuple[str, int], int]:
    """Return what is committed once that has not changed for two seconds: what had passed is committed by then."""
    seen: list[dict[tuple[str, int], int]] = []

    def at_rest() -> bool:
        seen.append(job.kafka.committed_offsets(job.group, job.requests))
        return len(seen) > 1 and seen[-1] == seen[-2]

    eventually(at_rest, "nothing is committed any more", 60, 2.0)
    return seen[-1]


def expel(proxy: Proxy, job: Job, mode: dict[str, Any], hangs: Any, why: str) -> None:
    """Let connections hang until the worker has lost its partitions, then heal them and check everything."""
    with Watch(job, promise_of(mode)) as watch:
        worker = job.start(**SIZES, **mode)
        job.await_answered(2_000)
        proxy.freeze(hangs)
        worker.await_event("partitions_lost")
        watch.fault(why, since_start=True)
        proxy.heal()
        job.await_settled(300)
        worker.await_ready()
    repeated(watch.verify())
    assert worker.stop() == 0


@every_mode
def test_connections_that_hang_for_longer_than_the_session_break_no_promise(
    proxy: Proxy, job: Job, mode: dict[str, Any]
) -> None:
    """Half open: nothing is refused and nothing arrives; what hung is delivered late."""
    expel(proxy, job, mode, network.everything, "everything hangs")


@every_mode
def test_a_producer_that_is_cut_off_alone_holds_up_the_commits_and_repeats_nothing(
    proxy: Proxy, job: Job, mode: dict[str, Any]
) -> None:
    with Watch(job, promise_of(mode)) as watch:
        worker = job.start(**SIZES, **mode)
        job.await_answered(2_000)
        proxy.freeze(network.producers)
        before = committed_at_rest(job)
        time.sleep(EXPELLED_SECONDS)
        assert job.kafka.committed_offsets(job.group, job.requests) == before
        proxy.heal()
        job.await_settled(300)
        worker.await_ready()
    assert repeated(watch.verify()) == 0
    assert worker.events("partitions_lost") == []
    assert worker.stop() == 0


@every_mode
def test_a_consumer_that_is_cut_off_alone_loses_its_partitions_and_breaks_no_promise(
    proxy: Proxy, job: Job, mode: dict[str, Any]
) -> None:
    """Outcomes still leave, and nothing can be committed: what left is repeated, or in a transaction refused."""
    expel(proxy, job, mode, network.consumers, "the consumer hangs")


@every_mode
def test_answers_that_take_long_cost_time_and_nothing_else(proxy: Proxy, job: Job, mode: dict[str, Any]) -> None:
    """A fifth of a second each; a transaction takes some five of them, one after the other."""
    with Watch(job, promise_of(mode)) as watch:
        worker = job.start(**{**SIZES, "batch__max_batch_size": 256}, **mode)
        job.await_answered(1_000)
        proxy.delay_seconds = 0.1
        job.await_settled(300)
    assert repeated(watch.verify()) == 0
    assert worker.metric("forebay_rebalances_total") == 1
    assert worker.stop() == 0


@every_mode
def test_connections_that_are_reset_again_and_again_break_no_promise(
    proxy: Proxy, job: Job, mode: dict[str, Any]
) -> None:
    chance = random.Random(drawn_seed())
    with Watch(job, promise_of(mode)) as watch:
        worker = job.start(**SIZES, **mode)
        cuts = 0
        for _ in range(20):
            cuts += proxy.cut(chance.choice([network.everything, network.producers, network.consumers]))
            time.sleep(chance.uniform(0.05, 0.5))
        job.await_settled(300)
        if worker.events("partitions_lost"):
            watch.fault("reset", since_start=True)
    print(f"{cuts} connections reset")
    repeated(watch.verify())
    assert worker.stop() == 0


@pytest.mark.parametrize("held", ["answer", "request"])
def test_an_end_of_a_transaction_that_comes_after_its_time_out_changes_nothing(
    proxy: Proxy, job: Job, held: str
) -> None:
    """The worker cannot know how it ended. The late request comes when the next transactions are under way: fenced."""
    mode = MODES["exactly once"]
    with Watch(job, promise_of(mode)) as watch:
        worker = job.start(**SIZES, **mode)
        job.await_answered(2_000)
        proxy.hold(**{f"{held}s": network.END_TXN})
        eventually(lambda: proxy.holds(network.END_TXN), "an end of a transaction is under way")
        worker.await_event("partitions_rewound")
        answered = job.answered()
        proxy.hold()
        job.await_answered(answered + 500)
        job.await_settled(300)
    # What was committed behind the worker's back is in no counter of its own.
    reports = tuple(replace(report(one), counters=None) for one in job.workers)
    assert repeated(watch.verify(workers=reports)) == 0
    assert worker.stop() == 0
