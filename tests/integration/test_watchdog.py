"""The way out of calls that never return, in a process of its own: it ends that, says so, and sleeps with it."""

from __future__ import annotations

import subprocess
import sys

STUCK = """
import time
from forebay.watchdog import leave_within
with leave_within(0.2, 70):
    time.sleep(60)
"""

FROZEN = """
import os, signal, subprocess, time
from forebay.watchdog import leave_within
with leave_within(2.0, 70):
    subprocess.Popen(["/bin/sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.05)  # the watchdog has its turn
print("finished")
"""

FINE = """
from forebay.watchdog import leave_within
for _ in range(50):
    with leave_within(60, 70):
        pass
print("finished")
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


def test_a_call_that_does_not_return_ends_the_process_with_a_sentence() -> None:
    ended = run(STUCK)
    assert ended.returncode == 70
    assert ended.stderr == "forebay: a call to Kafka has not returned for 0.2 s, so this worker leaves\n"


def test_a_process_that_was_frozen_goes_on_where_it_was() -> None:
    """A worker that was stopped in a transaction for longer than the limit died of it when it woke, without a word."""
    ended = run(FROZEN)
    assert (ended.returncode, ended.stdout) == (0, "finished\n"), ended.stderr


def test_a_call_that_returns_leaves_nothing_behind() -> None:
    ended = run(FINE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "finished\n", "")
