"""A worker that dies at each place of the way of a request, on a real broker: what is left keeps every invariant.

The places are the failpoints of `forebay.failpoints`. One run goes through several, a death after the other, since a
start of a worker costs more than what it does before it dies. `make test` dies at the places where a promise could
break between two systems, and leaves all places to the simulation; `make faults-long` goes through every one of them.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
from typing import Any

import pytest

from tests.faults.dumps import Watch
from tests.faults.history import Promise
from tests.integration.job import QUICK, Job, ask, ask_binary, magic
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import Send, eventually
from tests.magic import Magic
from tests.seeds import drawn_seed

SIZES = {"batch__max_batch_size": 16, "model__options": {"seconds": 0.002}, "delivery__commit_interval_ms": 20}
STATIC = {**QUICK, "group.instance.id": "the-one"}
"""A static member: its successor has the partitions at once, without waiting for the session to end."""
AT_LEAST_ONCE = {"delivery__guarantee": "at_least_once"}
EXACTLY_ONCE = {"delivery__guarantee": "exactly_once", "delivery__transaction_timeout_ms": 6000}
MODES = {"at least once": AT_LEAST_ONCE, "exactly once": EXACTLY_ONCE}
ON_THE_WAY = ("after_receive", "after_submit", "before_produce", "after_produce")
PLACES = {
    "at least once": (*ON_THE_WAY, "before_commit", "after_commit"),
    "exactly once": (
        *ON_THE_WAY,
        "before_transaction_offsets",
        "in_transaction",
        "before_transaction_commit",
        "after_transaction_commit",
    ),
}
BETWEEN = {"at least once": ("before_commit",), "exactly once": ("before_transaction_commit",)}
IN_A_REPLICA = ("replica_before_run", "replica_after_run")


def promise_of(mode: dict[str, Any]) -> Promise:
    return Promise(mode["delivery__guarantee"])


def requests(total: int) -> list[Send]:
    """Requests in both encodings, one in fifty of them poison that fails alone."""
    poison = [Magic.RAISE, Magic.NAN]
    sends = [ask(n) if n % 2 else ask_binary(n) for n in range(total)]
    for n in range(25, total, 50):
        sends[n] = magic(f"magic-{n}", poison[n // 50 % 2])
    return sends


def die_on_the_way(job: Job, watch: Watch, failpoints: str, **mode: Any) -> None:
    """Run a worker until its failpoint kills it."""
    worker = job.launch(failpoints=failpoints, kafka__client=STATIC, **SIZES, **mode)
    worker.await_killed()
    watch.fault(failpoints)


def die_while_draining(job: Job, watch: Watch, **mode: Any) -> None:
    """Send SIGTERM to a worker that has work left; it dies while it finishes that."""
    before = job.answered()
    worker = job.start(failpoints="during_drain=kill@2", kafka__client=STATIC, **SIZES, **mode)
    job.await_answered(before + 1)
    worker.signal(signal.SIGTERM)
    worker.await_killed()
    watch.fault("during_drain")


def die_while_giving_back(job: Job, watch: Watch, **mode: Any) -> WorkerProcess:
    """Let a second worker join; the first dies in its callback, behind the answers and before the commit.

    Where the group has given the first one up instead, which loses its partitions without a callback to die in, the
    second one goes and comes again.
    """
    first = job.start(failpoints="during_revoke=kill", kafka__client=STATIC, **SIZES, **mode)
    second = job.launch(**SIZES, **mode)
    for _ in range(4):
        with contextlib.suppress(subprocess.TimeoutExpired):
            first.process.wait(20)
            break
        assert second.stop() == 0, second.text()
        second = job.launch(**SIZES, **mode)
    first.await_killed()
    watch.fault("during_revoke")
    return second


def die_at(job: Job, places: tuple[str, ...], chance: random.Random, total: int, name: str) -> None:
    """Let one worker after the other die, the last two while they drain and give back; check what is left."""
    mode = MODES[name]
    job.send(requests(total))
    with Watch(job, promise_of(mode)) as watch:
        for place in places:
            die_on_the_way(job, watch, f"{place}=kill@{chance.randrange(2, 7)}", **mode)
        die_while_draining(job, watch, **mode)
        survivor = die_while_giving_back(job, watch, **mode)
        job.await_settled()
        assert survivor.stop() == 0, survivor.text()
    history = watch.verify()
    assert len(history.faults) == len(places) + 2
    assert len(history.letters) >= total // 50


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_dying_between_the_answer_and_its_commit_breaks_no_promise(job: Job, name: str) -> None:
    """Between the two, while draining, and while giving a partition back: where only the order of steps helps."""
    die_at(job, BETWEEN[name], random.Random(7), 3_000, name)


@pytest.mark.long
@pytest.mark.parametrize("name", MODES)
def test_dying_at_every_place_in_turn_breaks_no_promise(job: Job, name: str) -> None:
    die_at(job, PLACES[name], random.Random(drawn_seed()), 3_000, name)


@pytest.mark.parametrize(("name", "place"), list(zip(MODES, IN_A_REPLICA, strict=True)))
def test_a_replica_that_dies_around_its_run_costs_nothing_but_time(job: Job, name: str, place: str) -> None:
    """No fault of the worker: nothing may be repeated, whatever the guarantee."""
    job.send(requests(400))
    with Watch(job, promise_of(MODES[name])) as watch:
        worker = job.launch(["--until-end"], f"{place}=kill@20", **SIZES, **MODES[name])
        assert worker.wait(180) == 0, worker.text()
    watch.verify()
    assert worker.events("replica_lost")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param("at least once", "before_commit", marks=pytest.mark.long),
        ("exactly once", "before_transaction_offsets"),
        pytest.param("exactly once", "in_transaction", marks=pytest.mark.long),
        pytest.param("exactly once", "before_transaction_commit", marks=pytest.mark.long),
    ],
)
def test_a_worker_that_is_frozen_until_it_is_expelled_and_then_wakes_breaks_no_promise(
    job: Job, name: str, place: str
) -> None:
    """The zombie: it wakes behind its answers and before its commit, when its partitions are somebody else's."""
    mode = MODES[name]
    job.send(requests(2_000))
    with Watch(job, promise_of(mode)) as watch:
        zombie = job.start(failpoints=f"{place}=stop@4", **SIZES, **mode)
        eventually(lambda: is_stopped(zombie), "the worker freezes itself")
        job.run_to_end(**SIZES, **mode)
        zombie.signal(signal.SIGCONT)
        eventually(lambda: zombie.events("partitions_lost"), "the zombie learns that it was expelled", 60)
        watch.fault("frozen", since_start=True)
        assert zombie.stop() == 0, zombie.text()
    watch.verify()


def is_stopped(worker: WorkerProcess) -> bool:
    with open(f"/proc/{worker.process.pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "T"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("before_comit=kill", "did you mean before_commit?"),
        ("before_commit=die", "known are kill, stop, sleep, error"),
        ("before_commit", "must read place=action"),
    ],
)
def test_a_failpoint_that_does_not_exist_is_refused_at_the_start(job: Job, text: str, words: str) -> None:
    worker = job.launch(failpoints=text)
    assert worker.wait() == 78, worker.text()
    assert words in worker.text()
    assert "Traceback" not in worker.text()


def test_an_error_inside_the_worker_ends_it_with_a_sentence_and_commits_nothing(job: Job) -> None:
    job.send([ask(1)])
    worker = job.launch(failpoints="before_produce=error:out of luck")
    assert worker.wait() == 70, worker.text()
    assert worker.text().rstrip().endswith("forebay: out of luck")
    assert job.answered() == 0
    assert not any(job.kafka.committed_offsets(job.group, job.requests).values())
    job.run_to_end()
    assert [outcome.key for outcome in job.outcomes()] == [b"1"]


@pytest.mark.long
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize(
    "place", [*PLACES["at least once"], *PLACES["exactly once"][4:], "during_drain", "during_revoke"]
)
def test_ten_thousand_requests_survive_three_deaths_at_one_place(job: Job, name: str, place: str) -> None:
    mode = MODES[name]
    if place not in (*PLACES[name], "during_drain", "during_revoke"):
        pytest.skip(f"a worker that delivers {name} never passes {place}")
    chance = random.Random(drawn_seed())
    job.send(requests(10_000))
    with Watch(job, promise_of(mode)) as watch:
        for _ in range(3):
            if place == "during_drain":
                die_while_draining(job, watch, **mode)
            elif place == "during_revoke":
                assert die_while_giving_back(job, watch, **mode).await_ready().stop() == 0
            else:
                die_on_the_way(job, watch, f"{place}=kill@{chance.randrange(1, 40)}", **mode)
        job.run_to_end(**SIZES, **mode)
    assert len(watch.verify().faults) == 3
