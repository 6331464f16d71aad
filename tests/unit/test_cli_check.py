"""`forebay check`: findings, exit codes, and what can be asked without Kafka and without torch."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.check_machine import _answer, _port
from forebay.cli.findings import Finding, State, as_json, exit_code, failed, ok, print_findings, skipped, warning
from forebay.cli.topics import topics_command
from forebay.settings import Ops
from forebay.stream.addresses import connect_to

MODEL = """from forebay import Model, TensorSpec
class M(Model):
    inputs = [TensorSpec("x", "FP32", [-1, 2])]
    outputs = [TensorSpec("y", "FP32", [-1, 2])]
    def forward(self, x): """


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOREBAY_KAFKA__BOOTSTRAP_SERVERS", "FOREBAY_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([ok("a", "fine"), warning("b", "look"), skipped("c", "no")], 0),
        ([ok("a", "fine"), failed("b", "gone", unavailable=True)], 69),
        ([failed("a", "wrong"), failed("b", "gone", unavailable=True)], 78),
    ],
)
def test_the_exit_code_says_whether_to_mend_or_to_wait(findings: list[Finding], code: int) -> None:
    assert exit_code(findings) == code
    assert as_json(findings)["ok"] is (code == 0)


def test_every_failure_is_printed_with_its_fix_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    command = "kafka-topics.sh --create --topic " + "x" * 200
    found = [ok("settings", "valid"), failed("topic x", "does not exist", command)]
    assert print_findings(iter(found), ["settings", "topic x"]) == found
    lines = capsys.readouterr().out.splitlines()
    assert f"  → {command}" in lines
    assert lines[-1] == "1 failed, 0 warnings, 1 ok"


def test_a_wrong_setting_is_the_only_finding_and_exits_with_78() -> None:
    result = CliRunner().invoke(app, ["check", "--json", "--set", "batch.max_batchsize=3"], standalone_mode=False)
    assert result.return_value == 78
    told = json.loads(result.output)
    assert [finding["state"] for finding in told["findings"]] == ["failed"]
    assert "did you mean batch.max_batch_size" in told["findings"][0]["told"]


def test_a_kafka_that_is_not_there_is_69_and_names_each_address(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text('model: {name: m, factory: "a:B"}\nops: {port: 0}\n')
    command = ["check", "--json", "--no-load", "-c", str(tmp_path / "w.yaml"), "-b", "127.0.0.1:1,no.invalid:9"]
    result = CliRunner().invoke(app, command, standalone_mode=False)
    assert result.return_value == 69
    told = [finding["told"] for finding in json.loads(result.output)["findings"]]
    assert "127.0.0.1:1: connection refused" in told
    assert "no.invalid:9: the name does not resolve" in told


def test_addresses_are_probed_one_by_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = connect_to(f"127.0.0.1:{port}, 127.0.0.1:1, PLAINTEXT://[::1]:1")
    assert [(address.port, address.error is None) for address in found] == [(port, True), (1, False), (1, False)]


def test_a_taken_port_is_told_with_what_to_set() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        finding = _port(Ops(port=server.getsockname()[1]), "forebay")
    assert (finding.state, "address already in use" in finding.told) == (State.FAILED, True)
    assert "ops.port" in (finding.fix or "")
    assert _port(Ops(port=0), "forebay").state is State.OK


def test_a_model_process_that_dies_is_an_answer() -> None:
    died = subprocess.CompletedProcess([], -11, stdout=b"", stderr=b"loading\nSegmentation fault\n")
    assert _answer(died) == {"error": "its process ended with -11: Segmentation fault"}


def test_a_fix_names_the_broker_command_with_the_configured_port() -> None:
    result = CliRunner().invoke(app, ["check", "--json", "--no-load", "-b", "127.0.0.1:1"], standalone_mode=False)
    assert "forebay broker --port 1)" in json.loads(result.output)["findings"][1]["fix"]


def test_the_topics_command_repeats_what_the_configuration_was_made_of() -> None:
    told = topics_command(Path("my worker.yaml"), "a:1", ["kafka.output_topic=x"])
    assert told == "forebay topics --config 'my worker.yaml' --bootstrap-servers a:1 --set kafka.output_topic=x"


def test_a_finding_is_printed_before_the_next_question_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was on the screen until the model was loaded, which may take a minute."""
    seen: list[str] = []

    def asking() -> Iterator[Finding]:
        yield ok("settings", "valid")
        seen.append(capsys.readouterr().out)
        yield ok("a topic with a long name", "there")

    print_findings(asking(), ["a topic with a long name"])
    assert seen == ["✓ settings                  valid\n"]
    assert capsys.readouterr().out.splitlines()[0] == "✓ a topic with a long name  there"
