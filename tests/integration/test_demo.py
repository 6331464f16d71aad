"""`forebay demo` as a user runs it: a real worker, real results, a true exit code, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from forebay import broker as ladder
from forebay.broker import Broker
from forebay.cli import app
from forebay.stream import admin
from tests.kafka_probe import KafkaProbe, eventually

pytest.importorskip("torch", reason="the examples need torch")

ROOT = Path(__file__).parents[2]
MARK = "TEST_RUN_OF_THE_DEMO"


def _environment(**variables: str) -> dict[str, str]:
    """An environment without settings of ours; a mark finds the processes of this run, grandchildren included."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    return {**kept, MARK: os.urandom(8).hex(), **variables}


def _start(*arguments: str, environment: Mapping[str, str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "forebay", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(environment),
        cwd=folder,
        preexec_fn=_hear_interrupts,
    )


def _hear_interrupts() -> None:
    """Be as in a terminal: what runs in the background, as these tests may, has signals ignored by its shell."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _run(*arguments: str, environment: Mapping[str, str], folder: Path) -> tuple[int, str, str]:
    with _start(*arguments, environment=environment, folder=folder) as process:
        try:
            output, errors = process.communicate(timeout=240)
        finally:
            process.kill()
    return process.returncode, output, errors


def _of_this_run(environment: Mapping[str, str]) -> list[str]:
    """The processes that carry this run's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == environment[MARK] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture
def on_the_broker(broker: Broker) -> dict[str, str]:
    """An environment that names the session's broker as a cluster of the user's own."""
    return _environment(FOREBAY_KAFKA__BOOTSTRAP_SERVERS=broker.bootstrap_servers)


@pytest.fixture
def topics_before(kafka: KafkaProbe) -> Iterator[set[str]]:
    """The topics of the cluster; the demo must leave no other behind."""
    before = set(admin.partition_counts(kafka.config))
    yield before
    eventually(
        lambda: (
            not {name for name in admin.partition_counts(kafka.config) if name.startswith("forebay-demo-")} - before
        ),
        "the demo's topics are deleted",
    )


def test_the_demo_gets_a_right_result_for_every_request_and_says_so_to_a_program(
    on_the_broker: dict[str, str], topics_before: set[str], tmp_path: Path
) -> None:
    status, output, errors = _run("-e", "digits", "-n", "150", "--json", environment=on_the_broker, folder=tmp_path)
    assert status == 0, errors
    events = [json.loads(line) for line in output.splitlines()]
    assert [event["event"] for event in events] == ["broker", *["result"] * 150, "summary"]
    assert (events[0]["kind"], events[0]["real"]) == ("configured", True)
    results, summary = events[1:-1], events[-1]
    assert all(result["right"] and result["latency_ms"] > 0 and result["batch_size"] >= 1 for result in results)
    assert [result["alone"] for result in results] == [True] * 10 + [False] * 140
    assert all(result["batch_size"] == 1 for result in results[:10])
    assert (summary["requests"], summary["results"], summary["right"]) == (150, 150, 150)
    assert (summary["errors"], summary["duplicates"], summary["all_right"]) == (0, 0, True)
    assert sum(summary["cuts"].values()) == sum(summary["batches"].values())
    assert not _of_this_run(on_the_broker)


@pytest.mark.slow
def test_the_demo_names_each_photo_in_a_line_that_a_person_can_read_without_a_terminal(
    on_the_broker: dict[str, str], topics_before: set[str], tmp_path: Path
) -> None:
    status, output, errors = _run("-n", "21", environment=on_the_broker, folder=tmp_path)
    assert status == 0, output + errors
    assert "\x1b" not in output
    assert re.search(
        r"^✓ chelsea\.png +a cat +(tabby|tiger cat|Egyptian cat) +\d+% \S+ +batch 1 +[\d.]+ ms$", output, re.M
    )
    assert re.search(r"^✓ coffee\.png +an espresso +espresso +\d+% \S+ +batch 1 +[\d.]+ ms$", output, re.M)
    assert len(re.findall(r"^[✓✗] .* batch \d+ +[\d.]+ ms$", output, re.M)) == 21
    for line in ("21 sent, 21 results, 0 errors", "of the unmodified inputs 7 of 7", "requests/s", "p99", "mean size"):
        assert line in output
    assert "your Kafka" in output
    assert not _of_this_run(on_the_broker)


def test_a_worker_that_cannot_start_ends_the_demo_with_its_exit_code_and_the_end_of_its_log(
    on_the_broker: dict[str, str], topics_before: set[str], tmp_path: Path
) -> None:
    environment = on_the_broker | {"FOREBAY_INFERENCE__DEVICE": "cuda:63"}
    status, output, errors = _run("-e", "digits", environment=environment, folder=tmp_path)
    assert status == 78, output + errors
    assert "the end of the worker's log" in output
    assert "cuda:63" in output
    assert "the worker ended with exit status 78" in errors
    assert "Traceback" not in errors
    assert not _of_this_run(environment)


def test_a_wrong_setting_ends_the_demo_before_a_broker_starts(tmp_path: Path) -> None:
    status, output, errors = _run(
        "-e", "digits", environment=_environment(FOREBAY_INFERENCE__DEVICE="abacus"), folder=tmp_path
    )
    assert (status, output) == (78, "")
    assert "'abacus' is not a device" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("number", "moment"), [(signal.SIGINT, "starting the worker"), (signal.SIGTERM, "✓ scan"), (signal.SIGHUP, "…")]
)
def test_an_interrupted_demo_takes_worker_and_broker_with_it(
    number: signal.Signals, moment: str, tmp_path: Path
) -> None:
    environment = _environment(PYTHONUNBUFFERED="1")
    with _start("-e", "digits", "-n", "100000", environment=environment, folder=tmp_path) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if moment in line:
                    break
            process.send_signal(number)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, output + errors
    assert "worker and broker are gone" in output
    assert "Traceback" not in errors
    assert not _of_this_run(environment)


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [(["-e", "nonsense"], 2, "there is no example 'nonsense'; one of"), (["-n", "0"], 2, "--requests")],
)
def test_a_wrong_option_is_refused_before_anything_starts(
    arguments: list[str], status: int, sentence: str, tmp_path: Path
) -> None:
    found, output, errors = _run(*arguments, environment=_environment(), folder=tmp_path)
    assert (found, output) == (status, "")
    assert sentence in errors


@pytest.mark.slow
def test_the_demo_says_clearly_that_the_mock_cluster_is_a_stand_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(ladder, "RUNGS", [rung for rung in ladder.RUNGS if rung[0] == "mock"])
    app(["demo", "-e", "digits", "-n", "12"], standalone_mode=False)
    output = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "This is not Apache Kafka" in output
    assert "broker librdkafka's mock cluster, a stand-in" in output
    assert "12 sent, 12 results, 0 errors" in output
