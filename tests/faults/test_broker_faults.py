"""A broker that restarts, dies, or lacks a topic while a worker is busy: it waits, says why, and goes on."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.conftest import EmbeddedKafkas
from tests.faults.checker import verify
from tests.faults.dumps import Watch, dump
from tests.faults.history import Promise
from tests.integration.job import Job, MakeJob, ask, check_answers, check_once, error_code
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import KafkaProbe, Send, eventually

SLOW = {"batch__max_batch_size": 16, "model__options": {"seconds": 0.01}}


def own_job(cluster: object, make_job: MakeJob, partitions: int = 3) -> Job:
    """Return a job on a broker of the test's own."""
    job: Job = make_job(KafkaProbe(cluster.bootstrap_servers), partitions)  # type: ignore[attr-defined]
    return job


@pytest.mark.slow
def test_a_broker_that_restarts_or_dies_under_load_costs_no_request(
    embedded_kafka: EmbeddedKafkas, make_job: MakeJob
) -> None:
    cluster = embedded_kafka()
    job = own_job(cluster, make_job)
    total = 12_000
    job.send(ask(n) for n in range(total))
    with Watch(job, Promise()) as watch:
        worker = job.start(**SLOW)
        job.await_answered(1_000)
        cluster.stop_broker()
        worker.await_not_ready()
        cluster.restart()
        worker.await_ready()
        watch.fault("the broker restarted", since_start=True)
        job.await_answered(job.answered() + 1_000)
        cluster.kill()
        worker.await_not_ready()
        cluster.restart()
        worker.await_ready()
        watch.fault("the broker died", since_start=True)
        job.await_settled()

    watch.verify()
    assert worker.get("/livez")[0] == 200
    assert worker.stop() == 0


def test_an_output_topic_that_is_deleted_holds_everything_up_until_it_is_back(job: Job) -> None:
    worker = job.start(batch__max_batch_size=8)
    job.send(ask(n, partition=n % 3) for n in range(30))
    before = {outcome.key for outcome in job.await_settled()}
    assert len(before) == 30
    committed = job.kafka.committed_offsets(job.group, job.requests)
    job.kafka.delete_topics(job.results)
    job.send(ask(n, partition=n % 3) for n in range(30, 90))

    reasons = worker.await_not_ready()
    assert job.results in reasons["delivery"]
    assert job.kafka.committed_offsets(job.group, job.requests) == committed
    job.kafka.create_topics({job.results: 2})

    outcomes = job.await_settled()
    worker.await_ready()
    check_once(outcomes, map(str, range(30, 90)))
    check_answers(outcomes)


def test_nothing_is_committed_past_a_poison_record_without_its_dead_letter(job: Job) -> None:
    worker = job.start()
    job.send([ask(0, partition=0), ask(1, partition=1)])
    job.await_settled()
    job.kafka.delete_topics(job.dead)
    job.send([ask(2, partition=0), Send(b"{", b"bad", partition=0), *[ask(n, partition=0) for n in range(3, 9)]])
    job.send([ask(n, partition=1) for n in range(9, 15)])

    reasons = worker.await_not_ready()
    assert job.dead in reasons["delivery"]
    marks = {(job.requests, 0): 2, (job.requests, 1): 7}
    eventually(
        lambda: marks.items() <= job.kafka.committed_offsets(job.group, job.requests).items(),
        "everything that is finished is committed",
    )
    job.await_answered(16)
    assert job.kafka.committed_offsets(job.group, job.requests)[job.requests, 0] == 2
    job.kafka.create_topics({job.dead: 1})

    outcomes = job.await_settled()
    worker.await_ready()
    check_once(outcomes, [*map(str, range(15)), "bad"])
    [letter] = job.dead_letters()
    assert (letter.key, letter.value) == (b"bad", b"{")
    assert job.kafka.committed_offsets(job.group, job.requests)[job.requests, 0] == 9


def test_an_input_topic_that_is_deleted_and_made_again_is_read_from_its_start(job: Job) -> None:
    worker = job.start()
    job.send(ask(n, partition=n % 3) for n in range(30))
    job.await_settled()
    job.kafka.delete_topics(job.requests)
    eventually(lambda: worker.metric("forebay_partitions_assigned") == 0, "the partitions are taken away", 60)
    assert worker.process.poll() is None
    job.kafka.create_topics({job.requests: 2})
    job.send(ask(n, partition=n % 2) for n in range(30, 50))

    job.await_answered(50)
    check_once(job.outcomes(), map(str, range(50)))
    worker.await_ready()


@pytest.mark.slow
def test_a_slow_model_with_a_backlog_keeps_its_place_in_the_group(job: Job) -> None:
    """One batch takes longer than the client may go without polling: the loop polls on, paused."""
    gate = job.folder / "gate"
    gate.touch()
    total = 3_000
    job.send(ask(n) for n in range(total))
    client = {"max.poll.interval.ms": 4000, "session.timeout.ms": 3000, "heartbeat.interval.ms": 500}
    worker = job.start(kafka__client=client, model__options={"gate": str(gate)}, batch__max_batch_size=8)
    worker.await_metric("forebay_paused", 1)
    held = worker.metric("forebay_queue_requests") + worker.metric("forebay_in_flight_requests")
    assert held <= 8 * 8
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > 9, "two poll intervals pass", 15)
    assert worker.get("/readyz") == (200, {"ready": True, "reasons": {}})
    gate.unlink()

    job.await_settled()
    verify(dump(job, Promise()))
    assert worker.metric("forebay_rebalances_total") == 1
    assert worker.metric("forebay_client_events_total", name="_MAX_POLL_EXCEEDED") == 0
    worker.await_metric("forebay_paused", 0)


def refused(worker: WorkerProcess, code: int) -> str:
    """Return the one sentence with which a worker refuses to start."""
    assert worker.wait() == code, worker.text()
    assert "Traceback" not in worker.text(), worker.text()
    sentences = [line for line in worker.text().splitlines() if not line.startswith("{")]
    assert len(sentences) == 1, worker.text()
    assert sentences[0].startswith("forebay: ")
    return sentences[0]


def test_a_worker_that_cannot_start_says_why_in_one_sentence(job: Job) -> None:
    port = job.start().url
    assert port is not None
    number = int(port.rsplit(":", 1)[1])
    starts: dict[str, tuple[dict[str, Any], int, str]] = {
        "away": ({"kafka__bootstrap_servers": "127.0.0.1:1"}, 69, "127.0.0.1:1"),
        "topic": ({"kafka__output_topic": "nowhere"}, 78, "topic nowhere does not exist"),
        "key": ({"batch__max_batch_sice": 3}, 78, "did you mean batch.max_batch_size?"),
        "owned": ({"kafka__client": {"acks": 1}}, 78, "acks may not be changed"),
        "unknown property": ({"kafka__client": {"no.such.property": 1}}, 78, "no.such.property"),
        "port": ({"ops__port": number}, 78, f"ops.port {number} on 127.0.0.1 cannot be opened"),
        "module": ({"model__factory": "tests.no_models:Double"}, 78, "no module 'tests.no_models'"),
        "class": ({"model__factory": "tests.models:Triple"}, 78, "tests.models has no 'Triple'"),
        "options": ({"model__options": {"speed": 3}}, 78, "speed"),
        "warm-up": ({"model__factory": "tests.models:FailsWarmUp"}, 78, "the warm-up is too much"),
        "death": ({"model__factory": "tests.models:DiesInWarmUp"}, 78, "exited with code 9"),
        "hang": (
            {"model__factory": "tests.models:NeverLoads", "inference__start_timeout_ms": 10_000},
            78,
            "was not ready within inference.start_timeout_ms (10000 ms)",
        ),
        "model": ({"model__factory": None}, 78, "set factory (package.module:Class)"),
    }
    launched = {}
    for name, (changes, _, _) in starts.items():
        launched[name] = job.launch(**changes)
        if len(launched) % 3 == 0:
            launched[name].process.wait(120)
    for name, (_, code, words) in starts.items():
        assert words in refused(launched[name], code), name


def test_without_an_offset_and_a_rule_where_to_start_it_stops_and_says_so(job: Job) -> None:
    job.send([ask(1)])
    sentence = refused(job.launch(kafka__auto_offset_reset="error"), 78)
    assert "set kafka.auto_offset_reset to earliest or latest" in sentence
    assert job.answered() == 0


def test_an_outcome_for_a_reply_topic_that_does_not_exist_holds_up_nobody_for_ever(job: Job) -> None:
    """A name that the pattern allows is the caller's: no topic, no reply, but an error where the operator looks."""
    job.start(kafka__reply_topics="reply-.*")
    job.send([ask(0), ask(1, headers=[("kafka_replyTopic", b"reply-nobody")]), ask(2)])
    outcomes = job.await_settled()
    check_once(outcomes, ["0", "1", "2"])
    [error] = [outcome for outcome in outcomes if outcome.key == b"1"]
    assert error_code(error) == "reply_not_allowed"
    assert "reply-nobody" in json.loads(error.value or b"")["error"]
