"""The whole worker on real Kafka: `forebay run` as an operator starts it, seen from topics, port and log."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import Topics
from tests.integration.job import Job, MakeJob, answer, ask, ask_binary, check_answers, check_once, error_code
from tests.kafka_probe import KafkaProbe, Read, Send, eventually

pytestmark = pytest.mark.usefixtures("plain_python")


def malformed(number: int) -> tuple[str, Send]:
    """Return a request that cannot be run, and its error code."""
    name, key = f"bad-{number}", f"bad-{number}".encode()
    good = json.loads(ask(number).value or b"")
    tensor = good["inputs"][0]
    headers = [("kafka_correlationId", b"\x00\xff%d" % number), ("odd", None)]
    bodies: list[tuple[str, bytes | None]] = [
        ("invalid_payload", b'{"inputs": ['),
        ("invalid_tensor", json.dumps({**good, "inputs": [{**tensor, "datatype": "INT32"}]}).encode()),
        ("invalid_tensor", json.dumps({**good, "inputs": [{**tensor, "shape": [1, 5]}]}).encode()),
        ("invalid_payload", json.dumps(good).replace("2.0", "NaN").encode()),
        ("invalid_payload", None),
        ("invalid_payload", b""),
        ("unknown_model", json.dumps(good).encode()),
        ("unsupported_type", json.dumps(good).encode()),
        ("invalid_payload", b"\xff\xfe\x00 no text"),
        ("reply_not_allowed", json.dumps(good).encode()),
    ]
    code, value = bodies[number % len(bodies)]
    headers += {
        "unknown_model": [("model", b"nobody")],
        "unsupported_type": [("content-type", b"image/png")],
        "reply_not_allowed": [("kafka_replyTopic", b"not-allowed")],
    }.get(code, [])
    return code, Send(value, key, [("x-request-id", name.encode()), *headers])


def test_a_thousand_mixed_requests_have_a_thousand_outcomes(job: Job, kafka: KafkaProbe, topics: Topics) -> None:
    [inbox] = topics("inbox", partitions=2)
    counts = {number: 1 + number % 3 for number in range(980)}
    sends = [
        ask(
            number, count, headers=[("kafka_correlationId", b"\x00\xff%d" % number), ("traceparent", b"00-%d" % number)]
        )
        if number % 2
        else ask_binary(number, count, [("correlation_id", b"c%d" % number), ("ce_id", b"e"), ("unrelated", b"u")])
        for number, count in counts.items()
    ]
    away = [
        Send(s.value, s.key, [*s.headers, ("kafka_replyTopic", inbox.encode()), ("kafka_replyPartition", b"\0\0\0\1")])
        for s in sends[:10]
    ]
    sends[:10] = away
    bad = [malformed(number) for number in range(20)]
    for place, (_, send) in enumerate(bad):
        sends.insert(place * 49, send)

    job.send(sends)
    worker = job.start(kafka__reply_topics=f"{inbox}.*", model__name="double", model__version="7")
    outcomes = job.await_settled()

    replies = kafka.read_all(inbox)
    assert {reply.partition for reply in replies} == {1}
    check_once(replies, map(str, range(10)))
    wrong = {f"bad-{number}": code for number, (code, _) in enumerate(bad)}
    check_once(outcomes, [*map(str, range(10, 980)), *wrong])
    good = [outcome for outcome in [*outcomes, *replies] if (outcome.key or b"").isdigit()]
    check_answers(good, counts)
    errors = {(outcome.key or b"").decode(): error_code(outcome) for outcome in outcomes if outcome not in good}
    assert errors == wrong
    requests = kafka.read_all(job.requests)
    check_headers(outcomes + replies, requests)
    check_dead_letters(job.dead_letters(), {request.source: request for request in requests}, wrong, job)
    assert worker.metric("forebay_requests_total") == 1000
    assert worker.stop() == 0
    assert job.answered() == 990


def check_headers(outcomes: list[Read], requests: list[Read]) -> None:
    """Fail unless every outcome names its source and has the contract's headers, with the echoed ones unchanged."""
    by_source = {request.source.encode(): request for request in requests}
    echoed = ("kafka_correlationId", "correlation_id", "traceparent", "ce_id")
    for outcome in outcomes:
        request = by_source.pop(outcome.header("source") or b"")
        names = Counter(name for name, _ in outcome.headers)
        assert {"status", "source", "model", "batch-size", "content-type"} <= names.keys(), outcome
        assert max(names.values()) == 1, outcome
        assert "unrelated" not in names
        assert "odd" not in names
        for name in echoed:
            assert outcome.header(name) == request.header(name), name
        if outcome.header("status") == b"ok":
            assert request.key == outcome.key
            assert (outcome.header("model"), outcome.header("model-version")) == (b"double", b"7")
            assert outcome.header("content-type") == request.header("content-type") or b"application/json"
            assert int(outcome.header("batch-size") or 0) >= len(answer(outcome))
    assert not by_source


def check_dead_letters(letters: list[Read], requests: dict[str, Read], wrong: dict[str, str], job: Job) -> None:
    """Fail unless each wrong request has one dead letter, byte for byte, that says where it came from and why."""
    assert len(letters) == len(wrong)
    for letter in letters:
        partition = int.from_bytes(letter.header("kafka_dlt-original-partition") or b"", "big")
        offset = int.from_bytes(letter.header("kafka_dlt-original-offset") or b"", "big")
        request = requests.pop(f"{job.requests}/{partition}/{offset}")
        assert (letter.key, letter.value) == (request.key, request.value)
        assert letter.headers[: len(request.headers)] == request.headers
        added = dict(letter.headers[len(request.headers) :])
        assert added["kafka_dlt-original-topic"] == job.requests.encode()
        assert added["kafka_dlt-original-consumer-group"] == job.group.encode()
        assert int.from_bytes(added["kafka_dlt-original-timestamp"] or b"", "big") == request.timestamp_ms
        assert added["forebay-error-code"] == wrong[(request.key or b"").decode()].encode()
        assert added["kafka_dlt-exception-fqcn"]
        assert added["kafka_dlt-exception-message"]
        assert added["forebay-attempts"] == b"1"


def test_the_port_tells_what_the_worker_does_and_its_counters_agree_with_the_topics(job: Job) -> None:
    job.send([ask(n, parameters={"priority": n % 3}) for n in range(300)])
    job.send([malformed(n)[1] for n in range(10)])
    job.send([ask(n, headers=[("deadline-ms", b"1")]) for n in range(300, 305)])
    worker = job.start(model__name="double", batch__max_batch_size=8)
    outcomes = job.await_settled()

    for path, word in (("/livez", "live"), ("/readyz", "ready"), ("/startupz", "started"), ("/v2/health/live", "live")):
        assert worker.get(path) == (200, {word: True, "reasons": {}}), path
    assert worker.get("/v2/health/ready") == (200, {"ready": True, "reasons": {}})
    assert worker.get("/v2/models/double/ready") == (200, {"name": "double", "ready": True, "reasons": {}})
    status, body = worker.get("/v2/models/nobody/ready")
    assert (status, "it serves double" in body["error"]) == (404, True)
    assert worker.get("/nowhere")[0] == 404
    check_once(outcomes, [*map(str, range(305)), *[f"bad-{n}" for n in range(10)]])
    late = [outcome for outcome in outcomes if int(outcome.header("batch-size") or -1) == 0]
    codes = Counter(error_code(outcome) for outcome in outcomes if outcome.header("status") == b"error")
    assert codes["deadline_exceeded"] == 5
    assert len(late) == codes.total() == 15
    letters = job.dead_letters()
    assert len(letters) == 10
    eventually(lambda: worker.metric("forebay_dead_letters_total") == 10, "the gauges are fresh")
    for code, number in [*codes.items(), ("ok", 300)]:
        assert worker.metric("forebay_requests_total", outcome=code) == number, code
    assert worker.metric("forebay_request_duration_seconds_count") == 315
    assert worker.metric("forebay_rows_total") == 300
    assert worker.metric("forebay_batch_cuts_total") == worker.metric("forebay_batch_size_count")
    assert worker.metric("forebay_batch_cuts_total") == worker.metric("forebay_executions_total")
    assert worker.metric("forebay_batch_size_sum") == 300
    assert worker.metric("forebay_batch_size_bucket", le="8.0") == worker.metric("forebay_batch_size_count")
    assert worker.metric("forebay_committed_offset") == sum(job.kafka.end_offsets(job.requests).values())
    for name in ("lag_records", "queue_requests", "queue_bytes", "in_flight_requests", "unacknowledged_outcomes"):
        name = f"forebay_partition_{name}" if name == "lag_records" else f"forebay_{name}"
        worker.await_metric(name, 0)


def test_urgent_requests_overtake_and_late_ones_are_not_run(job: Job, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    worker = job.start(model__options={"gate": str(gate)}, batch__max_batch_size=1, batch__max_queue_size=100)
    job.send([ask(0, partition=0), ask(1, partition=0)])
    worker.await_metric("forebay_in_flight_requests", 2)  # the replica is full
    late = {2: ask(2, headers=[("timeout-ms", b"300")]), 3: ask(3, parameters={"timeout": 300_000})}
    job.send(late.values())
    job.await_answered(2)  # while the model still computes: the late ones are answered when they are late
    assert {error_code(outcome) for outcome in job.outcomes()} == {"deadline_exceeded"}
    job.send(ask(n, partition=0) for n in range(4, 14))
    job.send([ask(14, partition=0, headers=[("priority", b"2")]), ask(15, partition=0, parameters={"priority": 1})])
    worker.await_metric("forebay_queue_requests", 12)
    gate.unlink()

    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(16)))
    check_answers(outcome for outcome in outcomes if outcome.key not in (b"2", b"3"))
    assert job.dead_letters() == []
    assert worker.metric("forebay_rows_total") == 14
    times = {int(outcome.key or b""): outcome.timestamp_ms for outcome in outcomes}
    assert times[15] <= times[14] <= min(times[n] for n in range(4, 14))


def test_a_batch_waits_to_be_full_where_the_mode_says_so(kafka: KafkaProbe, make_job: MakeJob) -> None:
    jobs = {dispatch: make_job(kafka) for dispatch in ("linger", "static")}
    for dispatch, job in jobs.items():
        job.launch(batch__dispatch=dispatch, batch__max_wait_ms=600_000, batch__max_batch_size=8)
    for job in jobs.values():
        [worker] = job.workers
        worker.await_ready()
        job.send(ask(n) for n in range(20))
        job.await_answered(16)
        worker.await_metric("forebay_queue_requests", 4)  # the rest waits
        assert {outcome.header("batch-size") for outcome in job.outcomes()} == {b"8"}
        job.send(ask(n) for n in range(20, 24))
        job.await_answered(24)
        job.send(ask(n) for n in range(24, 27))
        worker.await_metric("forebay_queue_requests", 3)
        assert worker.stop() == 0

        outcomes = job.outcomes()
        check_once(outcomes, map(str, range(27)))
        check_answers(outcomes)
        assert Counter(outcome.header("batch-size") for outcome in outcomes) == {b"8": 24, b"3": 3}
        assert job.is_settled()


def test_a_result_that_its_topic_does_not_take_becomes_an_error_once(kafka: KafkaProbe, make_job: MakeJob) -> None:
    job = make_job(kafka, max_message_bytes=20_000)

    def wish(id: str, size: int) -> Send:
        tensor = {"name": "size", "datatype": "INT64", "shape": [1], "data": [size]}
        return Send(json.dumps({"id": id, "inputs": [tensor]}).encode(), id.encode())

    job.send([wish(f"{n}", 1000 if n % 10 else 30_000) for n in range(100)])
    worker = job.run_to_end(model__factory="tests.models:Growing")

    outcomes = job.outcomes()
    check_once(outcomes, map(str, range(100)))
    large = [outcome for outcome in outcomes if outcome.header("status") == b"error"]
    assert {error_code(outcome) for outcome in large} == {"result_too_large"}
    assert sorted(int(outcome.key or b"") for outcome in large) == list(range(0, 100, 10))
    assert len(job.dead_letters()) == 10
    assert worker.events("kafka_event") == []


def test_until_end_passes_transaction_markers_and_aborted_requests(job: Job) -> None:
    from confluent_kafka import Producer

    producer = Producer({**job.kafka.config, "transactional.id": job.group})
    producer.init_transactions(30)
    for number in range(6):
        producer.begin_transaction()
        for n in range(10):
            send = ask(number * 10 + n)
            producer.produce(job.requests, send.value, send.key, partition=number % 3)
        if number % 2:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)

    job.run_to_end()

    outcomes = job.outcomes()
    committed = [number * 10 + n for number in (0, 2, 4) for n in range(10)]
    check_once(outcomes, map(str, committed))
    check_answers(outcomes)


def test_a_record_that_cannot_be_decompressed_has_an_error_and_is_passed(kafka: KafkaProbe, make_job: MakeJob) -> None:
    """A few kilobytes that unfold to more than the client takes: it would report them for ever, and read no further."""
    job = make_job(kafka, partitions=1)
    job.send([ask(0)])
    bomb = Send(bytes(120_000_000), b"bomb")
    kafka.produce(job.requests, [bomb], compression_type="zstd", message_max_bytes=200_000_000)
    job.send(ask(n) for n in range(2, 8))

    worker = job.start()
    outcomes = job.await_settled()

    [error] = [outcome for outcome in outcomes if outcome.header("status") == b"error"]
    assert error.header("source") == f"{job.requests}/0/1".encode()
    assert error_code(error) == "invalid_payload"
    assert "unreadable" in json.loads(error.value or b"")["error"]
    good = [outcome for outcome in outcomes if outcome is not error]
    check_once(good, ["0", *map(str, range(2, 8))])
    check_answers(good)
    [letter] = job.dead_letters()
    assert int.from_bytes(letter.header("kafka_dlt-original-offset") or b"", "big") == 1
    assert job.kafka.committed_offsets(job.group, job.requests) == {(job.requests, 0): 8}
    worker.await_ready()
