"""One embedded Kafka node: its folder, its JVM and the leash that holds the JVM.

Signals reach the JVM through the leash, never by process id from here: the leash alone knows whether the id still
belongs to that JVM.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from forebay.brokers import leash
from forebay.brokers.properties import LOGGING, LOGGING_3, NodeAddress, as_text, server_properties
from forebay.errors import KafkaUnavailableError

JVM_OPTIONS = ("-Xmx512m", "-XX:+UseSerialGC", "-Djava.awt.headless=true")
TOOL_OPTIONS = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class Node:
    """A broker and controller in one JVM; kept across restarts, with its ports and its data."""

    def __init__(self, address: NodeAddress, folder: Path, temporary: bool) -> None:
        self.address = address
        self.folder = folder
        self.temporary = temporary
        self._leash: subprocess.Popen[bytes] | None = None
        self.paused = False

    @property
    def log(self) -> Path:
        """The file that takes what the JVM prints."""
        return self.folder / "kafka.log"

    @property
    def running(self) -> bool:
        """Whether the JVM exists; a paused one does."""
        return self._leash is not None and self._leash.poll() is None

    @property
    def java_pid(self) -> int | None:
        """The JVM's process id, to look at it; orders go through the leash."""
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self._leash.pid).children() if self._leash else []
            return children[0].pid if children else None
        return None

    def prepare(self, cluster: Sequence[NodeAddress], extra: Mapping[str, str]) -> None:
        """Write the configuration files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        properties = server_properties(self.address, cluster, self.folder, extra)
        self._settings.write_text(as_text(properties))
        (self.folder / "log4j2.properties").write_text(LOGGING)
        (self.folder / "log4j.properties").write_text(LOGGING_3)

    def start(self, java: Sequence[str], cluster_id: str) -> None:
        """Start the JVM; returns at once, long before the broker answers. Formats the storage if it is new."""
        doomed = str(self.folder) if self.temporary else ""
        command = [*java, *JVM_OPTIONS, *self._logging, "kafka.Kafka", str(self._settings)]
        if not (self.folder / "logs" / "meta.properties").exists():
            arguments = ["format", "-t", cluster_id, "-c", str(self._settings)]
            tool = [*java, *TOOL_OPTIONS, *self._logging, "kafka.tools.StorageTool", *arguments]
            command = [*tool, leash.THEN, *command]
        self._leash = subprocess.Popen(
            [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), str(self.log), doomed, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a terminal must reach us alone, so that we stop the JVM in order
        )
        self.paused = False

    def terminate(self) -> None:
        """Ask the JVM to stop."""
        self._send(b"T")

    def kill(self) -> None:
        """Kill the JVM, paused or not, and wait until it is gone."""
        self._send(b"K")
        self.wait(30)

    def pause(self) -> None:
        """Freeze the JVM: connections stay open and nothing answers."""
        self._send(b"S")
        self.paused = True

    def resume(self) -> None:
        """Let a frozen JVM go on."""
        self._send(b"C")
        self.paused = False

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the JVM is gone; returns whether it is."""
        if self._leash is None:
            return True
        try:
            self._leash.wait(0 if self.paused else timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        self._release()
        return True

    def last_lines(self, count: int = 8) -> str:
        """Return the end of the log without Java's stack frames, which push the reason out of sight."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            return "\n".join([line for line in lines if not line.startswith("\tat ")][-count:])
        return ""

    @property
    def _settings(self) -> Path:
        return self.folder / "server.properties"

    @property
    def _logging(self) -> tuple[str, ...]:
        new, old = self.folder / "log4j2.properties", self.folder / "log4j.properties"
        return (f"-Dlog4j2.configurationFile={new}", f"-Dlog4j.configuration={old.as_uri()}")

    def _send(self, order: bytes) -> None:
        if self._leash is None:
            raise KafkaUnavailableError(f"broker {self.address.number} is not running")
        with contextlib.suppress(BrokenPipeError):  # the JVM went away by itself: what was asked for is moot
            _pipe(self._leash.stdin).write(order)
            _pipe(self._leash.stdout).read(1)
        if order == b"K":
            self.paused = False

    def _release(self) -> None:
        if self._leash is not None:
            _pipe(self._leash.stdin).close()
            _pipe(self._leash.stdout).close()
        self._leash = None


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
