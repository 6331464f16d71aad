"""The leash, with a process that sleeps in place of a JVM: nothing outlives whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forebay.brokers import leash
from tests.kafka_probe import eventually, is_gone

# A parent that starts a leash as Node does, says the leash's id and waits to be killed.
PARENT = """
import os, subprocess, sys, time
leash = subprocess.Popen(
    [sys.executable, "-I", "-S", sys.argv[2], str(os.getpid()), sys.argv[3], sys.argv[4], *sys.argv[5:]],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
)
if sys.argv[1] == "fork" and os.fork() == 0:
    time.sleep(600)  # holds the write end of the leash's pipe after the parent is gone
print(leash.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def family() -> Iterator[list[psutil.Process]]:
    """Processes that the test started; whatever is left of them is killed."""
    started: list[psutil.Process] = []
    yield started
    for process in started:
        if process.is_running():
            process.kill()


def start_parent(
    how: str, folder: Path, family: list[psutil.Process]
) -> tuple[subprocess.Popen[str], psutil.Process, psutil.Process]:
    """Start parent, leash and sleeper, and return them."""
    command = [
        sys.executable,
        "-c",
        PARENT,
        how,
        leash.__file__,
        str(folder / "log"),
        str(folder / "node"),
        "sleep",
        "600",
    ]
    (folder / "node").mkdir(parents=True)
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    holder = psutil.Process(int(parent.stdout.readline()))
    sleeper = eventually(holder.children, "the leash starts its command")[0]
    family += [psutil.Process(parent.pid), *psutil.Process(parent.pid).children(), holder, sleeper]
    return parent, holder, sleeper


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_the_command_dies_with_a_parent_that_is_killed(how: str, tmp_path: Path, family: list[psutil.Process]) -> None:
    folder = tmp_path / "cluster"
    parent, holder, sleeper = start_parent(how, folder, family)
    (folder / "log").unlink()

    parent.kill()
    parent.wait()

    eventually(lambda: is_gone(sleeper), "the command dies")
    eventually(lambda: is_gone(holder), "the leash ends")
    assert not folder.exists(), "the orphan's data are still there"


def test_a_paused_command_dies_with_its_parent_as_well(tmp_path: Path, family: list[psutil.Process]) -> None:
    parent, _, sleeper = start_parent("plain", tmp_path / "cluster", family)
    sleeper.suspend()
    eventually(lambda: sleeper.status() == psutil.STATUS_STOPPED, "the command is paused")

    parent.kill()
    parent.wait()

    eventually(lambda: is_gone(sleeper), "the paused command dies")


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_the_command_dies_with_a_leash_that_is_killed(tmp_path: Path, family: list[psutil.Process]) -> None:
    _, holder, sleeper = start_parent("plain", tmp_path / "cluster", family)

    holder.kill()

    eventually(lambda: is_gone(sleeper), "the command dies")


def test_commands_run_in_order_and_what_they_print_is_kept(tmp_path: Path) -> None:
    with subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), str(tmp_path / "log"), ""),
            *("echo", "one", leash.THEN, "sh", "-c", "echo two >&2; exit 3", leash.THEN, "echo", "three"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.wait(30) == 3

    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_an_order_is_acknowledged_once_the_command_has_its_signal(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*(sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), str(tmp_path / "log"), ""), "sleep", "600"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        sleeper = eventually(psutil.Process(process.pid).children, "the leash starts its command")[0]

        process.stdin.write(b"S")
        assert process.stdout.read(1) == leash.ACKNOWLEDGED
        eventually(lambda: sleeper.status() == psutil.STATUS_STOPPED, "the command is paused")
        process.stdin.write(b"C")
        assert process.stdout.read(1) == leash.ACKNOWLEDGED
        eventually(lambda: sleeper.status() != psutil.STATUS_STOPPED, "the command goes on")
        process.stdin.write(b"T")

        assert process.wait(30) == 128 + signal.SIGTERM
