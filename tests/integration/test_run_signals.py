"""What signals do to `forebay run`: each in a process of its own, on a terminal that can be closed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

SCRIPT = """
import time, types
from forebay.cli.run import _install_signals
told = []
reloading = types.SimpleNamespace(ask=lambda: told.append("reload"))
worker = types.SimpleNamespace(stop=lambda: told.append("drain"), reloading=reloading)
_install_signals(worker, leaves_at_once=True)
print("ready", flush=True)
while not told:
    time.sleep(0.01)
print(told[0], flush=True)
"""


class Terminal:
    """A process that has taken its signals over, and leads the session of a terminal."""

    def __init__(self) -> None:
        self.ours, theirs = os.openpty()

        def lead() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        command = [sys.executable, "-c", SCRIPT]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, text=True, preexec_fn=lead)
        os.close(theirs)
        assert self.says() == "ready"

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """A terminal with its process, which ends with the test."""
    made = Terminal()
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.mark.parametrize(
    ("number", "does"), [(signal.SIGHUP, "reload"), (signal.SIGTERM, "drain"), (signal.SIGINT, "drain")]
)
def test_sighup_reloads_and_the_others_drain(terminal: Terminal, number: int, does: str) -> None:
    terminal.process.send_signal(number)
    assert terminal.says() == does
    os.close(terminal.ours)


def test_a_terminal_that_is_closed_drains_for_nobody_is_left_to_do_so(terminal: Terminal) -> None:
    os.close(terminal.ours)
    assert terminal.says() == "drain"
