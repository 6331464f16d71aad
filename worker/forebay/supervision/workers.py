"""One worker as its supervisor sees it: a process, what it said of itself, and how often it was started.

Runs on the supervisor's one thread, except for `url` and `state`, which the HTTP threads read.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from forebay.supervision.tether import ENVIRONMENT, label


class DeviceWorker:
    """The worker of one device. `command` starts it; `devices` are those of all workers."""

    def __init__(self, command: Sequence[str], device: str, devices: Sequence[str]) -> None:
        self.name = label(device)
        self.launches = 0
        self.restart_at: float | None = None
        self.code: int | None = None
        self.sentence: str | None = None
        self.url: str | None = None
        self._command = list(command)
        self._device = device
        self._devices = list(devices)
        self._process: subprocess.Popen[bytes] | None = None
        self._tether: socket.socket | None = None
        self._heard = b""
        self._must_reload = False

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self._process.pid if self._process is not None and self.code is None else None

    @property
    def is_running(self) -> bool:
        """Whether its process was started and has not been seen to end."""
        return self._process is not None and self.code is None

    @property
    def state(self) -> str:
        """Say for a person where it is in its life."""
        if self.is_running:
            return "the worker is starting"
        ended = f"the worker has {ended_with(self.code)}" if self.code is not None else "the worker was not started"
        return ended + ("" if self.restart_at is None else " and is started again soon")

    def launch(self) -> None:
        """Start its process, in a process group of its own: a Ctrl-C is for the supervisor, which passes it on."""
        ours, theirs = socket.socketpair()
        told = {"descriptor": theirs.fileno(), "device": self._device, "devices": self._devices}
        try:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, ENVIRONMENT: json.dumps(told)},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        finally:
            theirs.close()
        ours.setblocking(False)
        self._tether, self._heard = ours, b""
        self.code = self.sentence = self.url = self.restart_at = None
        self._must_reload = False
        self.launches += 1

    def look(self) -> bool:
        """Take in what it said; return whether it has just ended."""
        if not self.is_running:
            return False
        assert self._process is not None
        code = self._process.poll()  # before its words: whatever it said, it said before it ended
        self._listen()
        if code is None:
            return False
        self.code, self.url = code, None
        if self._tether is not None:
            self._tether.close()
            self._tether = None
        return True

    def signal(self, number: int) -> None:
        """Pass a signal on; a SIGHUP only when it is heeded: before that it would end the process."""
        if number == signal.SIGHUP and self.url is None:
            self._must_reload = True
        elif self.is_running and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once and wait for that; its replicas go with it."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._tether is not None and (some := self._tether.recv(65536)):
                self._heard += some
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, said: dict[str, Any]) -> None:
        self.url = said.get("url", self.url)
        if self._must_reload and self.url is not None:
            self._must_reload = False
            self.signal(signal.SIGHUP)
        self.sentence = said.get("sentence", self.sentence)


def ended_with(code: int | None) -> str:
    """Say how a process ended."""
    if code is None or code >= 0:
        return f"ended with code {code}"
    try:
        return f"been ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"been ended by signal {-code}"


def without_devices(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command without `--devices` and its value."""
    left: list[str] = []
    skips = False
    for argument in arguments:
        if not skips and not argument.startswith("--devices="):
            skips = argument == "--devices"
            if not skips:
                left.append(argument)
        else:
            skips = False
    return left
