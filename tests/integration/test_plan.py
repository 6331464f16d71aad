"""`forebay plan --from-topic` on real Kafka: the times of real records, read without a group; what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.errors import ConfigError, ForebayError, KafkaUnavailableError
from tests.conftest import Topics
from tests.kafka_probe import KafkaProbe, Send

START_MS = 1_700_000_000_000
Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    """A model that takes 2 ms and 0.1 ms for each row."""
    points = [{"rows": rows, "p50_ms": 2 + 0.1 * rows} for rows in (1, 2, 4, 8, 16, 32)]
    file = tmp_path / "curve.json"
    file.write_text(json.dumps({"format": "forebay-curve-1", "model": "m", "device": "d", "points": points}))
    return file


@pytest.fixture
def plan(kafka: KafkaProbe, curve: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Run `forebay plan --json` with the curve on the session's broker; returns what it printed."""
    monkeypatch.delenv("FOREBAY_KAFKA__BOOTSTRAP_SERVERS", raising=False)

    def run(topic: str, *arguments: str, servers: str = kafka.bootstrap_servers) -> dict[str, Any]:
        command = ["plan", "--from-topic", topic, "--curve", str(curve), "--json", "-b", servers, *arguments]
        result = CliRunner().invoke(app, command, standalone_mode=False)
        if isinstance(result.exception, ForebayError):
            raise result.exception
        assert result.exception is None, (result.exception, result.output)
        printed: dict[str, Any] = json.loads(result.stdout)
        return printed

    return run


def ask(number: int, at_ms: int, rows: int = 1, partition: int = -1, **headers: str) -> Send:
    """A request of some rows with a time of its own."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 4], "data": [0.5] * (4 * rows)}
    body = json.dumps({"id": str(number), "inputs": [tensor]}).encode()
    return Send(body, None, [(name, value.encode()) for name, value in headers.items()], partition, START_MS + at_ms)


def test_the_times_and_the_rows_of_a_topic_are_replayed(plan: Plan, kafka: KafkaProbe, topics: Topics) -> None:
    (topic,) = topics("requests", partitions=3)
    kafka.produce(topic, [ask(number, 10 * number, rows=2, partition=number % 3) for number in range(201)])
    found = plan(topic, "--max-batch-size", "32", "--dispatch", "eager,linger", "--max-wait-ms", "4")
    assert found["traffic"]["requests"] == 201
    assert found["traffic"]["rows"] == 402
    assert found["traffic"]["seconds"] == 2.0
    assert found["traffic"]["rate"] == 100.0
    assert found["traffic"]["notes"] == []
    eager, linger = found["candidates"]
    assert eager["p50_ms"] == pytest.approx(2.2 + 0.2, abs=0.001), "each is alone: service and overhead"
    assert linger["p50_ms"] == pytest.approx(4 + 2.2 + 0.2, abs=0.001), "each waits out its 4 ms"
    assert eager["mean_batch"] == linger["mean_batch"] == 2.0
    assert found["recommended"]["batch"] == {"max_batch_size": 32, "dispatch": "eager"}
    assert kafka.committed_offsets("forebay.tail", topic) == {}


def test_only_the_newest_records_are_replayed(plan: Plan, kafka: KafkaProbe, topics: Topics) -> None:
    (topic,) = topics("requests", partitions=2)
    kafka.produce(topic, [ask(number, 1000 * number, partition=number % 2) for number in range(100)])
    found = plan(topic, "--records", "20")
    assert found["traffic"]["requests"] == 20
    assert found["traffic"]["seconds"] == 19.0
    assert plan(topic, "--records", "20", "--speed", "10")["traffic"]["seconds"] == 1.9


def test_a_trace_begins_where_every_partition_was_read(plan: Plan, kafka: KafkaProbe, topics: Topics) -> None:
    """A hot partition reaches back less far than a quiet one: before that, traffic would be missing."""
    (topic,) = topics("requests", partitions=2)
    hot = [ask(number, 10 * number, partition=0) for number in range(300)]
    quiet = [ask(number, 600 * number, partition=1) for number in range(5)]
    kafka.produce(topic, hot + quiet)
    traffic = plan(topic, "--records", "100")["traffic"]
    assert traffic["rate"] == pytest.approx(101, abs=2)
    assert traffic["requests"] == 100


def test_requests_expire_at_the_deadlines_of_their_records(plan: Plan, kafka: KafkaProbe, topics: Topics) -> None:
    hurried, patient = topics("hurried", "patient")
    times = [number // 100 for number in range(400)]
    kafka.produce(hurried, [ask(number, at, **{"timeout-ms": "9"}) for number, at in enumerate(times)])
    kafka.produce(patient, [ask(number, at) for number, at in enumerate(times)])
    tried = ("--max-batch-size", "32", "--dispatch", "eager")
    assert plan(hurried, *tried)["candidates"][0]["expired"] > 200, "three batches of 32 fit into 12 ms at most"
    assert plan(patient, *tried)["candidates"][0]["expired"] == 0


def test_a_topic_without_records_or_with_one_is_no_traffic(plan: Plan, kafka: KafkaProbe, topics: Topics) -> None:
    (topic,) = topics("requests", partitions=2)
    with pytest.raises(ConfigError, match=f"topic {topic} holds no record.*--rate"):
        plan(topic)
    kafka.produce(topic, [ask(0, 0)])
    with pytest.raises(ConfigError, match="holds one record"):
        plan(topic)
    with pytest.raises(ConfigError, match="no record of the last 5 minutes"):
        plan(topic, "--minutes", "5")


def test_times_that_are_all_equal_tell_nothing(plan: Plan, kafka: KafkaProbe, topics: Topics) -> None:
    (topic,) = topics("requests")
    kafka.produce(topic, [ask(number, 7) for number in range(50)])
    with pytest.raises(ConfigError, match=r"carry the same time \(2023-11-14.*--rate"):
        plan(topic)


def test_a_missing_topic_and_an_unreachable_kafka_are_told(plan: Plan, kafka: KafkaProbe) -> None:
    with pytest.raises(ConfigError, match="no-such-topic"):
        plan("no-such-topic")
    with pytest.raises(KafkaUnavailableError, match=r"127\.0\.0\.1:1") as caught:
        plan("requests", servers="127.0.0.1:1")
    assert caught.value.exit_code == 69


def test_records_that_are_no_requests_count_as_one_row_each(plan: Plan, kafka: KafkaProbe, topics: Topics) -> None:
    (topic,) = topics("requests")
    kafka.produce(topic, [Send(b"?", timestamp_ms=START_MS + number) for number in range(10)])
    traffic = plan(topic)["traffic"]
    assert traffic["rows"] == 10
    assert traffic["notes"] == ["10 records of 10 tell no shape: taken as one row each"]
