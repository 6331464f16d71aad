"""The tether between a supervisor and one worker: a socket pair, one JSON object per line, from the worker alone.

The worker's end also tells it that the supervisor is gone, however it went: then the worker drains and leaves. The
supervisor's end is not inherited by anybody, so it closes with the supervisor's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from forebay.errors import ForebayError

ENVIRONMENT = "FOREBAY_SUPERVISED"
"""Tells a worker that it has a supervisor: the descriptor of its end, its device and the devices of all workers."""


class Tether:
    """A worker's end."""

    def __init__(self, descriptor: int, device: str, devices: list[str]) -> None:
        self.name = label(device)
        self.device = device
        self.devices = devices
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)

    def watch(self) -> None:
        """Drain when the supervisor is gone: SIGTERM to this process, as from an orchestrator. Starts a thread."""

        def wait() -> None:
            with contextlib.suppress(OSError):
                while self._socket.recv(1024):
                    pass
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, name="forebay-tether", daemon=True).start()

    def tell(self, **said: Any) -> None:
        """Tell the supervisor something; it may be gone."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(said).encode() + b"\n")

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Let the supervisor say why this worker ends: several workers that fail alike say it once."""
        try:
            yield
        except ForebayError as error:
            self.tell(sentence=str(error))
            raise SystemExit(error.exit_code) from error


def tether_of_this_worker() -> Tether | None:
    """Return the tether to the supervisor of this process; None where it has none. The environment says so once."""
    told = os.environ.pop(ENVIRONMENT, None)
    return Tether(**json.loads(told)) if told else None


def label(device: str) -> str:
    """Return a device's name without its options, for logs and metrics."""
    return device.partition("?")[0]
