"""A real Apache Kafka in a JVM of its own, on loopback, for demos, tests and development.

The caller's thread starts and stops it and needs no other. It knows jars, ports and folders, never what is read or
written. The JVM cannot outlive the process that started it (see `leash`).
"""

from __future__ import annotations

import base64
import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from forebay.brokers import ports
from forebay.brokers.jars import KAFKA_VERSION, Announce, class_path, java
from forebay.brokers.node import Node
from forebay.brokers.ports import free_port
from forebay.errors import ConfigError, KafkaUnavailableError, UsageError

__all__ = ["EmbeddedKafka", "free_port"]

START_SECONDS = 120.0
STOP_SECONDS = 20.0
_ATTEMPTS = 3


class EmbeddedKafka:
    """One cluster of `brokers` nodes, numbered from 0, each a broker and a controller.

    `port` is the first broker's, the others follow; 0 takes free ones. Without `data_dir` the data live in a
    temporary folder that goes with the cluster. `properties` are Kafka's own and override ours. `version` may be any
    Apache Kafka since 3.7.
    """

    def __init__(
        self,
        brokers: int = 1,
        port: int = 0,
        data_dir: Path | str | None = None,
        properties: Mapping[str, str] | None = None,
        announce: Announce = lambda line: None,
        version: str = KAFKA_VERSION,
    ) -> None:
        self._brokers = brokers
        self._port = port
        self._data_dir = None if data_dir is None else Path(data_dir).expanduser().resolve()
        self._properties = dict(properties or {})
        self._announce = announce
        self.version = version
        self._java: list[str] = []
        self._folder: Path | None = None
        self._nodes: list[Node] = []
        self._claim: IO[str] | None = None

    @property
    def bootstrap_servers(self) -> str:
        """The brokers' addresses, as `bootstrap.servers` wants them."""
        if not self._nodes:
            raise KafkaUnavailableError("the embedded Kafka is not started")
        return ",".join(node.address.server for node in self._nodes)

    def start(self) -> Self:
        """Start the cluster and return once it answers; raises KafkaUnavailableError with the end of its log."""
        if self._nodes:
            return self
        if self._brokers < 1:
            raise UsageError(f"a cluster needs at least one broker, not {self._brokers}")
        jars = class_path(self._announce, self.version)
        self._java = [str(java()), "-cp", os.pathsep.join(map(str, jars))]
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._start_nodes()
                return self
            except _PortTaken as error:
                if self._port or attempt == _ATTEMPTS:
                    raise KafkaUnavailableError(str(error)) from error
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """Stop every broker; temporary data are removed, kept data are closed in order first."""
        nodes, self._nodes = self._nodes, []
        try:
            running = [node for node in nodes if node.running]
            if self._data_dir is not None:
                for node in running:
                    node.resume()
                    node.terminate()
                deadline = time.monotonic() + STOP_SECONDS
                for node in running:
                    node.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for node in nodes:
                if node.running:
                    node.kill()
            if self._folder is not None and self._data_dir is None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            if self._claim is not None:
                self._claim.close()
                self._claim = None

    def kill(self, broker: int = 0) -> None:
        """Kill a broker (SIGKILL) as a crash would."""
        self._node(broker).kill()

    def stop_broker(self, broker: int = 0) -> None:
        """Stop a broker in order (SIGTERM) and wait until it is gone."""
        node = self._node(broker)
        node.terminate()
        if not node.wait(STOP_SECONDS):
            node.kill()

    def pause(self, broker: int = 0) -> None:
        """Freeze a broker (SIGSTOP): its connections stay open and nothing answers."""
        self._node(broker).pause()

    def resume(self, broker: int = 0) -> None:
        """Let a frozen broker go on (SIGCONT)."""
        self._node(broker).resume()

    def restart(self, broker: int = 0) -> None:
        """Start a broker again on its port and data, stopping it in order if it runs; returns once it answers."""
        node = self._node(broker)
        if node.running:
            self.stop_broker(broker)
        node.start(self._java, self._identity())
        self._await_answers()

    def java_pids(self) -> list[int]:
        """Return the process ids of the JVMs that run now."""
        return [node.java_pid for node in self._nodes if node.running and node.java_pid is not None]

    def last_lines(self) -> str:
        """Return the end of the log of a broker that does not run, or of the first one."""
        ended = [node for node in self._nodes if not node.running]
        return (ended or self._nodes)[0].last_lines() if self._nodes else ""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_nodes(self) -> None:
        addresses = ports.addresses(self._brokers, self._port)
        if self._data_dir is not None:
            self._claim = _claim(self._data_dir, self._brokers)
        self._folder = self._data_dir or Path(tempfile.mkdtemp(prefix="forebay-kafka-"))
        self._nodes = [
            Node(address, self._folder / f"broker-{address.number}", self._data_dir is None) for address in addresses
        ]
        try:
            for node in self._nodes:
                node.prepare(addresses, self._properties)
            for node in self._nodes:
                node.start(self._java, self._identity())
            self._await_answers()
        except BaseException:
            self.stop()
            raise

    def _identity(self) -> str:
        """Return the cluster's id, which kept data remember."""
        remembered = self._nodes[0].folder / "cluster-id"
        if not remembered.exists():
            # The first byte keeps the id from starting with "-", which the storage tool takes for an option.
            remembered.write_text(base64.urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).decode().rstrip("="))
        return remembered.read_text().strip()

    def _await_answers(self) -> None:
        from forebay.stream import admin

        deadline = time.monotonic() + START_SECONDS
        expected = [node for node in self._nodes if node.running and not node.paused]
        for node in expected:
            while not ports.listens(node.address.port):
                _insist_alive(expected)
                if time.monotonic() > deadline:
                    raise _failure(node, f"it does not answer after {START_SECONDS:.0f} s")
                time.sleep(0.05)
        config = {"bootstrap.servers": ",".join(node.address.server for node in expected)}
        left = deadline - time.monotonic()
        try:
            # Whoever listens may be another program that took the port: then our JVM ends, and that ends the wait.
            admin.wait_until_ready(config, len(expected), left, check=lambda: _insist_alive(expected))
            admin.wake_coordinator(config)
        except _StartFailed:
            raise
        except KafkaUnavailableError as error:
            raise _failure(expected[0], str(error)) from error

    def _node(self, broker: int) -> Node:
        if not 0 <= broker < len(self._nodes):
            raise UsageError(f"there is no broker {broker}: this cluster runs {len(self._nodes)}, numbered from 0")
        return self._nodes[broker]


class _StartFailed(KafkaUnavailableError):
    """A node did not start."""


class _PortTaken(_StartFailed):
    """Another process took a port between our check and the broker's start."""


def _insist_alive(nodes: list[Node]) -> None:
    for node in nodes:
        if not node.running:
            raise _failure(node, "its JVM ended while it started")


def _failure(node: Node, what: str) -> _StartFailed:
    """Describe why a node did not start, and keep its log where the message says."""
    if "Address already in use" in node.last_lines(200):
        return _PortTaken(f"port {node.address.port} was taken by another program while Kafka started")
    tail, log = node.last_lines(), node.log
    if node.temporary and log.exists():
        handle, name = tempfile.mkstemp(prefix="forebay-kafka-", suffix=".log")
        os.close(handle)
        log = Path(shutil.copy(log, name))
    return _StartFailed(f"Kafka's broker {node.address.number} did not start: {what}; log {log}:\n{tail}")


def _claim(folder: Path, brokers: int) -> IO[str]:
    """Take the folder for this cluster alone, until the returned file is closed or this process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim = open(folder / "in-use.lock", "w")  # noqa: SIM115  # open is what holds the lock
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; name another --data-dir") from error
    found = len(list(folder.glob("broker-*")))
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if found in (0, brokers):
            return claim
    except BlockingIOError as error:
        claim.close()
        raise ConfigError(f"another Kafka is using {folder}; stop it or name another --data-dir") from error
    # Its nodes would never agree on who votes.
    claim.close()
    raise ConfigError(f"{folder} holds a cluster of {found}; start it with --brokers {found}, or name a new folder")
