"""The commands against real Kafka, a stand-in for a worker, and then a real worker with the digits example."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.calls import InferenceTimeoutError
from forebay.cli.app import app
from forebay.cli.outcomes import headers_as_json
from forebay.errors import UsageError
from forebay.stream import admin
from forebay_schemas import DeadLetterHeaders, ErrorResult, InferenceResult, ResultHeaders
from tests.conftest import Topics
from tests.integration.responder import Responder
from tests.kafka_probe import KafkaProbe, Send, eventually

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Tools:
    """The command line with a configuration of its own topics."""

    config: Path
    requests: str
    results: str
    letters: str
    servers: str

    def run(self, *arguments: str, code: int = 0, stdin: str | None = None) -> str:
        """Run a command; returns its standard output."""
        command = [*arguments, "--config", str(self.config)]
        result = CliRunner().invoke(app, command, input=stdin, standalone_mode=False)
        assert result.exception is None, (result.exception, result.output)
        assert (result.return_value or 0) == code, result.output
        return result.stdout

    def lines(self, *arguments: str, code: int = 0, stdin: str | None = None) -> list[dict[str, object]]:
        """Run a command with --json; returns the documents of its lines."""
        return [json.loads(line) for line in self.run(*arguments, "--json", code=code, stdin=stdin).splitlines()]


def make_tools(folder: Path, servers: str, names: list[str], model: str = "") -> Tools:
    requests, results, letters = names
    config = folder / "worker.yaml"
    config.write_text(
        f"kafka: {{bootstrap_servers: '{servers}', input_topics: [{requests}], output_topic: {results}, "
        f"dead_letter_topic: {letters}, group_id: group-{requests}}}\nops: {{port: 0}}\n{model}"
    )
    return Tools(config, requests, results, letters, servers)


@pytest.fixture
def tools(kafka: KafkaProbe, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    monkeypatch.delenv("FOREBAY_KAFKA__BOOTSTRAP_SERVERS", raising=False)
    return make_tools(tmp_path, kafka.bootstrap_servers, topics("requests", "results", "letters", partitions=2))


def responder(tools: Tools) -> Responder:
    return Responder(tools.servers, tools.requests, tools.results)


def test_send_publishes_and_says_where_every_record_is(tools: Tools, kafka: KafkaProbe) -> None:
    stdin = '{"x": [[1, 2]]}\n{"id": "own", "inputs": [{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}\n'
    told = tools.lines("send", "--header", "kafka_correlationId=0xff00", "--timeout-ms", "5000", stdin=stdin)
    records = {record.source: record for record in kafka.read_all(tools.requests)}
    assert len(told) == len(records) == 2
    for line in told:
        record = records["{topic}/{partition}/{offset}".format(**line)]
        assert record.key == str(line["id"]).encode()
        assert record.header("kafka_correlationId") == b"\xff\x00"
        assert record.header("timeout-ms") == b"5000"
    assert "own" in {line["id"] for line in told}


def test_send_numbers_ids_and_keeps_to_its_rate(tools: Tools, kafka: KafkaProbe) -> None:
    stdin = '{"x": [1]}\n' * 5
    told = tools.lines("send", "--id-prefix", "p-", "--rate", "1000", stdin=stdin)
    assert {line["id"] for line in told} == {f"p-{number}" for number in range(1, 6)}
    assert {record.header("x-request-id") for record in kafka.read_all(tools.requests)} == {
        f"p-{number}".encode() for number in range(1, 6)
    }


def test_results_follow_from_the_beginning_to_the_end(tools: Tools) -> None:
    with responder(tools):
        tools.run("send", "--id-prefix", "r-", stdin='{"x": [1]}\n' * 20)
        found = tools.lines("results", "--from-beginning", "--count", "20", "--timeout", "60")
    assert {line["key"] for line in found} == {f"r-{number}" for number in range(1, 21)}
    assert all(line["status"] == "ok" for line in found)
    again = tools.lines("results", "--from-beginning", "--until-end", "--id", "r-3")
    assert [line["key"] for line in again] == ["r-3"]


def test_results_exit_with_1_if_fewer_come_than_were_asked_for(tools: Tools) -> None:
    assert tools.lines("results", "--count", "1", "--timeout", "0.5", code=1) == []


def test_request_prints_its_result_or_fails_with_1(tools: Tools) -> None:
    with responder(tools):
        (found,) = tools.lines("request", "--inputs", '{"x": [[1, 2]]}', "--id", "mine", "--timeout", "60")
        assert found["outputs"] == {"x": {"datatype": "INT64", "shape": [1, 2], "data": [[1, 2]]}}
        assert found["key"] == "mine"
        (failed,) = tools.lines("request", "--inputs", '{"fail": [1]}', "--timeout", "60", code=1)
        assert failed["code"] == "model_error"
        assert "error model_error it was asked to fail" in tools.run(
            "request", "--inputs", '{"fail": [1]}', "--timeout", "60", code=1
        )


def test_bench_measures_what_comes_back(tools: Tools) -> None:
    with responder(tools):
        options = ("--duration", "1", "--warm-up", "0.2", "--window", "8", "--timeout", "60")
        (summary,) = tools.lines("bench", "--inputs", '{"x": [1]}', *options)
    assert summary["statuses"] == {"ok": summary["requests"]}
    assert summary["unanswered"] == 0
    assert summary["batch_size"] == 1.0


def dead_letter(tools: Tools, number: int, code: str = "model_error", replays: int = 0) -> Send:
    own = [("kafka_correlationId", b"\xff\x00"), ("empty", None)]
    counted = [("forebay-replays", str(replays).encode())] if replays else []
    added = [
        ("kafka_dlt-original-topic", tools.requests.encode()),
        ("kafka_dlt-original-partition", (0).to_bytes(4, "big")),
        ("kafka_dlt-original-offset", number.to_bytes(8, "big")),
        ("kafka_dlt-exception-message", b"it broke"),
        ("forebay-error-code", code.encode()),
        ("forebay-attempts", b"3"),
    ]
    return Send(b"\x00value-%d" % number, b"key-%d" % number, own + counted + added)


@pytest.fixture
def letters(tools: Tools, kafka: KafkaProbe) -> Tools:
    codes = ["model_error", "invalid_payload", "model_error", "poisoned"]
    kafka.produce(tools.letters, [dead_letter(tools, number, code) for number, code in enumerate(codes)])
    kafka.produce(tools.letters, [dead_letter(tools, 9, "model_error", replays=3)])
    return tools


def test_dead_letters_are_listed_by_code_and_time(letters: Tools) -> None:
    assert len(letters.lines("dlq", "list")) == 5
    assert {line["id"] for line in letters.lines("dlq", "list", "--code", "model_error")} == {"key-0", "key-2", "key-9"}
    assert len(letters.lines("dlq", "list", "--since", "1h")) == 5
    assert letters.lines("dlq", "list", "--until", "1h") == []
    assert "it broke" in letters.run("dlq", "list")


def test_a_dead_letter_is_shown_whole(letters: Tools) -> None:
    (shown,) = letters.lines("dlq", "show", "key-1")
    assert shown["code"] == "invalid_payload"
    assert shown["origin"] == f"{letters.requests}/0/1"
    assert shown["value"] == "\x00value-1"
    assert "\\x00value-1" in letters.run("dlq", "show", str(shown["place"]))


def test_a_replay_gives_the_requests_back_byte_for_byte(letters: Tools, kafka: KafkaProbe) -> None:
    (told,) = letters.lines("dlq", "replay")
    assert (told["replayed"], told["replayed_too_often"], told["topics"]) == (4, 1, {letters.requests: 4})
    records = sorted(kafka.read_all(letters.requests), key=lambda record: record.key or b"")
    assert [(record.key, record.value) for record in records] == [
        (b"key-%d" % number, b"\x00value-%d" % number) for number in range(4)
    ]
    for record in records:
        assert record.headers == [("kafka_correlationId", b"\xff\x00"), ("empty", None), ("forebay-replays", b"1")]
    (again,) = letters.lines("dlq", "replay", "--since", str(told["next_since"]))
    assert again["replayed"] == 0


def test_a_dry_run_publishes_nothing(letters: Tools, kafka: KafkaProbe) -> None:
    (told,) = letters.lines("dlq", "replay", "--code", "model_error", "--dry-run")
    assert (told["dry_run"], told["replayed"]) == (True, 2)
    assert kafka.read_all(letters.requests) == []


def test_check_tells_missing_topics_with_the_command_that_makes_them(tools: Tools) -> None:
    told = json.loads(tools.run("check", "--json", "--no-load", "--set", "kafka.output_topic=nowhere", code=78))
    failed = [finding for finding in told["findings"] if finding["state"] == "failed"]
    assert [finding["question"] for finding in failed] == ["topic nowhere", "model"]
    ours, theirs = failed[0]["fix"].splitlines()
    assert ours == f"forebay topics --config {tools.config} --set kafka.output_topic=nowhere"
    assert f"--bootstrap-server {tools.servers} --create --topic nowhere" in theirs


def test_topics_makes_what_is_missing_and_leaves_what_is_there(
    kafka: KafkaProbe, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOREBAY_KAFKA__BOOTSTRAP_SERVERS", raising=False)
    (there,) = topics("requests", partitions=2)
    results, letters, replies = f"{there}-results", f"{there}-letters", f"{there}-replies"
    tools = make_tools(tmp_path, kafka.bootstrap_servers, [there, results, letters])
    made = {results: 4, letters: 4, replies: 4}
    config = {"bootstrap.servers": kafka.bootstrap_servers}
    command = ("topics", "--partitions", "4", "--topic", replies)
    try:
        assert tools.lines(*command, "--dry-run") == [{"dry_run": True, "made": made, "there": {there: 2}}]
        assert results not in admin.partition_counts(config)
        told = tools.run(*command)
        assert f"there   {there}, 2 partitions" in told
        assert f"made    {replies}, 4 partitions" in told
        counts = admin.partition_counts(config)
        assert {name: counts[name] for name in (there, *made)} == {there: 2} | made
        assert tools.lines(*command) == [{"dry_run": False, "made": {}, "there": {there: 2} | made}]
    finally:
        admin.delete_topics(config, list(made))


def test_send_says_how_many_of_standard_input_went_before_a_bad_line(tools: Tools, kafka: KafkaProbe) -> None:
    command = ["send", "--config", str(tools.config)]
    result = CliRunner().invoke(app, command, input='{"x": [1]}\n{"x": [2]}\nno\n{"x": [3]}\n', standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert "standard input:3: not JSON" in str(result.exception)
    assert str(result.exception).endswith(f"; 2 requests before it went to {tools.requests}")
    assert len(kafka.read_all(tools.requests)) == 2


def test_send_publishes_nothing_of_a_file_with_a_bad_line(tools: Tools, kafka: KafkaProbe, tmp_path: Path) -> None:
    """The lines before the bad one were published, and nobody was told."""
    (tmp_path / "r.jsonl").write_text('{"x": [1]}\nno\n')
    command = ["send", str(tmp_path / "r.jsonl"), "--config", str(tools.config)]
    result = CliRunner().invoke(app, command, standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert str(result.exception).endswith("; nothing was sent")
    assert kafka.read_all(tools.requests) == []


def test_results_say_first_where_they_start(tools: Tools) -> None:
    command = ["results", "--config", str(tools.config), "--timeout", "0.2", "--json"]
    result = CliRunner().invoke(app, command, standalone_mode=False)
    assert result.stdout == ""
    assert result.stderr == (
        f"following {tools.results} from its end (Ctrl-C ends it); --from-beginning shows earlier ones\n"
    )


def test_bench_without_a_worker_fails_with_1_and_a_sentence(tools: Tools) -> None:
    command = [
        "bench",
        "--inputs",
        '{"x": [[1.0]]}',
        "--window",
        "1",
        "--timeout",
        "0.5",
        "--config",
        str(tools.config),
    ]
    result = CliRunner().invoke(app, command, standalone_mode=False)
    assert isinstance(result.exception, InferenceTimeoutError)
    assert result.exception.exit_code == 1
    assert "is a worker running" in str(result.exception)


def test_check_asks_about_sizes_rights_and_the_group(tools: Tools, kafka: KafkaProbe, topics: Topics) -> None:
    (small,) = topics("small", max_message_bytes=10_000)
    told = json.loads(tools.run("check", "--json", "--no-load", "--set", f"kafka.dead_letter_topic={small}", code=78))
    by_question = {finding["question"]: finding for finding in told["findings"] if finding["state"] == "warning"}
    assert "max.message.bytes=" in by_question[f"topic {small}"]["fix"]
    fine = {finding["question"]: finding["told"] for finding in told["findings"] if finding["state"] == "ok"}
    assert "READ allowed" in fine[f"topic {tools.requests}"]
    assert "it will start at the first record kept" in fine[f"group group-{tools.requests}"]


@pytest.fixture(scope="module")
def served(any_kind_of_broker: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tools, str]]:
    """The digits example on a real worker, and the address of its metrics."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    if not any_kind_of_broker.is_real:  # type: ignore[attr-defined]
        pytest.skip("needs a real Kafka, and this machine has only librdkafka's mock cluster")
    servers = any_kind_of_broker.bootstrap_servers  # type: ignore[attr-defined]
    folder = tmp_path_factory.mktemp("digits")
    names = [f"{folder.name}-{kind}" for kind in ("requests", "results", "letters")]
    admin.create_topics({"bootstrap.servers": servers}, dict.fromkeys(names, 2))
    model = 'model: {name: digits, version: "1", factory: "examples.digits.model:Digits"}\n'
    tools = make_tools(folder, servers, names, model)
    log = (folder / "log").open("w")
    command = [sys.executable, "-m", "forebay", "run", "--config", str(tools.config)]
    worker = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield tools, str(eventually(lambda: _ops_url(folder / "log", worker), "the worker tells its port", 60))
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(60)
        admin.delete_topics({"bootstrap.servers": servers}, names)


def _ops_url(log: Path, worker: subprocess.Popen[bytes]) -> str | None:
    assert worker.poll() is None, log.read_text()
    for line in log.read_text().splitlines():
        if '"ops_url"' in line:
            return str(json.loads(line)["ops_url"])
    return None


def digits(count: int) -> tuple[str, list[int]]:
    """Requests as JSON lines, with the digit that each of them shows."""
    from examples.digits.samples import learned

    pixels, labels = learned()
    lines = [json.dumps({"pixels": [row.tolist()]}) for row in pixels[:count]]
    return "\n".join(lines) + "\n", [int(label) for label in labels[:count]]


def test_a_worker_reads_every_digit_that_is_sent(served: tuple[Tools, str]) -> None:
    tools, _ = served
    lines, labels = digits(50)
    tools.run("send", "--id-prefix", "d", stdin=lines)
    ids = [option for number in range(1, 51) for option in ("--id", f"d{number}")]
    found = tools.lines("results", "--from-beginning", "--timeout", "120", *ids)
    read = {line["id"]: line["outputs"]["digit"]["data"][0] for line in found}  # type: ignore[index]
    assert read == {f"d{number}": label for number, label in enumerate(labels, start=1)}


def test_a_mistake_becomes_a_dead_letter_that_a_replay_turns_into_a_second_one(served: tuple[Tools, str]) -> None:
    tools, _ = served
    wrong = ("request", "--inputs", '{"pixels": [[1.0, 2.0]]}', "--id", "wrong", "--timeout", "120")
    (told,) = tools.lines(*wrong, code=1)
    assert told["code"] == "invalid_tensor"
    assert [line["replays"] for line in tools.lines("dlq", "list", "--id", "wrong")] == [0]
    (replayed,) = tools.lines("dlq", "replay", "--id", "wrong")
    assert replayed["replayed"] == 1

    def listed() -> bool:
        return [line["replays"] for line in tools.lines("dlq", "list", "--id", "wrong")] == [0, 1]

    eventually(listed, "the replayed request is a dead letter again", 60)


def test_check_finds_nothing_wrong_where_a_worker_runs(
    served: tuple[Tools, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    tools, _ = served
    told = json.loads(tools.run("check", "--json"))
    assert told["ok"], told
    fine = {finding["question"]: finding["told"] for finding in told["findings"]}
    assert fine["model digits"] == "loads and runs: pixels FP32[-1, 64] → digit INT64[-1], probabilities FP32[-1, 10]"


def test_check_and_send_see_the_worker_that_runs_beside_them(served: tuple[Tools, str], kafka: KafkaProbe) -> None:
    tools, url = served
    port = ("--set", f"ops.port={url.rpartition(':')[2]}")
    told = json.loads(tools.run("check", "--json", "--no-load", *port))
    (found,) = [finding for finding in told["findings"] if finding["state"] == "warning"]
    assert (found["question"], "a worker of this group" in found["told"]) == ("HTTP port", True)
    before = kafka.end_offsets(tools.requests)
    command = ["send", "--config", str(tools.config), *port]
    wrong = CliRunner().invoke(app, command, input='{"image": [[1.0]]}\n', standalone_mode=False)
    assert isinstance(wrong.exception, UsageError)
    assert "digits takes pixels FP32[-1, 64]" in str(wrong.exception)
    assert str(wrong.exception).endswith("; nothing was sent")
    assert kafka.end_offsets(tools.requests) == before
    shown = CliRunner().invoke(app, ["top", "--once", "--interval", "0.1", "--config", str(tools.config), *port]).stdout
    assert shown.startswith(f"forebay top: {url.removeprefix('http://')}, over the last 0.1 s\n")


def test_check_tells_what_is_wrong_with_a_model(served: tuple[Tools, str]) -> None:
    tools, _ = served
    wrong = ("--set", "model.factory=no_such_module:Model", "--set", "inference.device=cpu")
    told = json.loads(tools.run("check", "--json", *wrong, code=78))
    failed = {finding["question"]: finding for finding in told["findings"] if finding["state"] == "failed"}
    assert "there is no module 'no_such_module'" in failed["model digits"]["told"]


def test_what_a_worker_writes_satisfies_the_published_schemas(served: tuple[Tools, str]) -> None:
    tools, _ = served
    wrong = ("request", "--inputs", '{"pixels": [[1.0]]}', "--timeout", "120")
    tools.run(*wrong, "--id", "schema-error", code=1)
    for encoding in ("json", "binary"):
        line = digits(1)[0]
        told = ("request", "-", "--encoding", encoding, "--model", "digits:1", "--timeout", "120")
        tools.run(*told, "--id", f"schema-{encoding}", stdin=line)
    probe = KafkaProbe(tools.servers)
    found = {
        record.key: record for record in probe.read_all(tools.results) if (record.key or b"").startswith(b"schema")
    }
    assert set(found) == {b"schema-error", b"schema-json", b"schema-binary"}
    for key, record in found.items():
        headers = ResultHeaders.model_validate(headers_as_json(record.headers) | {"kafka_correlationId": "opaque"})
        length = int(headers.json_length or len(record.value or b""))
        model = ErrorResult if headers.status == "error" else InferenceResult
        body = model.model_validate_json((record.value or b"")[:length])
        assert body.id == key.decode()
        assert headers.source.startswith(tools.requests)
    letters = [record for record in probe.read_all(tools.letters) if record.key == b"schema-error"]
    shown = DeadLetterHeaders.model_validate(headers_as_json(letters[0].headers))
    assert (shown.original_topic, shown.error_code) == (tools.requests, "invalid_tensor")


def test_top_shows_what_a_worker_does(served: tuple[Tools, str]) -> None:
    tools, url = served
    lines, _ = digits(20)
    tools.run("send", stdin=lines)
    result = CliRunner().invoke(app, ["top", "--once", "--json", "--interval", "0.5", "--url", url])
    (view,) = json.loads(result.stdout)
    assert view["replicas_ready"] == 1
    assert view["partitions"] == 2
    assert view["resident_bytes"] > 2**20
    shown = CliRunner().invoke(app, ["top", "--once", "--interval", "0.1", "--url", url]).stdout
    assert shown.startswith(f"forebay top: {url}, over the last 0.1 s\n")
    assert "…" not in shown
