"""`forebay broker` as a process: it says where Kafka is, ends in order, and takes its JVM along however it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from forebay.broker import free_port
from forebay.stream import admin
from tests.kafka_probe import eventually, is_gone


class Start(Protocol):
    def __call__(self, *arguments: str) -> subprocess.Popen[str]: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the command in a process group of its own; whatever is left of it at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        (tmp_path / "tmp").mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "forebay", "broker", *arguments],
            env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def greeting(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the line that `--json` prints once the broker answers."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the command ended first: {process.communicate()[1]}"
    found: dict[str, Any] = json.loads(line)
    return found


def jvms_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children(recursive=True) if "java" in child.name()]


def test_sigterm_ends_it_with_0_and_leaves_nothing(start: Start, tmp_path: Path) -> None:
    port = free_port()
    process = start("--port", str(port), "--topic", "requests:3", "--topic", "results", "--json")
    found = greeting(process)
    assert found["bootstrap_servers"] == f"127.0.0.1:{port}"
    assert found["topics"] == {"requests": 3, "results": 1}
    counts = admin.partition_counts({"bootstrap.servers": found["bootstrap_servers"]})
    assert (counts["requests"], counts["results"]) == (3, 1)
    jvms = jvms_of(process)
    assert len(jvms) == 1

    process.terminate()
    _, complaints = process.communicate(timeout=60)

    assert process.returncode == 0
    assert complaints == ""
    assert all(is_gone(jvm) for jvm in jvms)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_ctrl_c_reaches_the_whole_group_and_kept_data_are_closed_in_order(start: Start, tmp_path: Path) -> None:
    process = start("--data-dir", str(tmp_path / "kept"), "--topic", "t")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Apache Kafka 4.3.1 is running: 127.0.0.1:")
    jvms = jvms_of(process)

    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)

    assert process.returncode == 0
    assert all(is_gone(jvm) for jvm in jvms)
    # Kafka writes this marker as the last thing of an orderly stop; without it every start re-reads every segment.
    assert list((tmp_path / "kept").glob("broker-1/logs/.kafka_cleanshutdown"))


def test_a_signal_while_kafka_starts_ends_it_with_0_as_well(start: Start, tmp_path: Path) -> None:
    process = start()
    eventually(lambda: jvms_of(process), "the JVM is started")

    process.terminate()
    _, complaints = process.communicate(timeout=60)

    assert process.returncode == 0, complaints
    assert "Traceback" not in complaints
    eventually(lambda: list((tmp_path / "tmp").iterdir()) == [], "the data are removed")


def test_kill_9_leaves_no_jvm_and_no_data_even_of_a_paused_broker(start: Start, tmp_path: Path) -> None:
    process = start("--json")
    servers = greeting(process)["bootstrap_servers"]
    [jvm] = jvms_of(process)
    jvm.suspend()

    process.kill()
    process.communicate(timeout=60)

    eventually(lambda: is_gone(jvm), "the JVM dies with its parent")
    eventually(lambda: list((tmp_path / "tmp").iterdir()) == [], "the data are removed")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(servers.split(":")[1])), 1)


def test_a_jvm_that_dies_by_itself_is_reported(start: Start) -> None:
    process = start("--json")
    greeting(process)
    [jvm] = jvms_of(process)

    jvm.kill()
    _, complaints = process.communicate(timeout=60)

    assert process.returncode == 69
    assert "a broker ended by itself" in complaints
    assert "Traceback" not in complaints


def test_a_taken_port_is_one_sentence_and_exit_2(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = start("--port", str(port))
        printed, complaints = process.communicate(timeout=60)

    assert process.returncode == 2
    assert printed == ""
    assert complaints == f"forebay: port {port} is taken; choose another with --port, or none for a free one\n"
