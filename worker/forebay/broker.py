"""A broker to work against: the one you name, or a real Apache Kafka of our own; for demos, tests and development.

The ladder: `FOREBAY_KAFKA__BOOTSTRAP_SERVERS` → Apache Kafka's jars on a bundled Java → a container → librdkafka's mock
cluster, a stand-in that says so. The caller's thread does everything. Never part of a worker.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Literal

from forebay.brokers.container import container_broker
from forebay.brokers.embedded import EmbeddedKafka
from forebay.brokers.jars import KAFKA_VERSION, Announce
from forebay.brokers.ports import free_port
from forebay.errors import ForebayError, KafkaUnavailableError

__all__ = ["KAFKA_VERSION", "Broker", "EmbeddedKafka", "any_broker", "find_broker", "free_port"]

Kind = Literal["configured", "embedded", "container", "mock"]
VARIABLE = "FOREBAY_KAFKA__BOOTSTRAP_SERVERS"


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker that answers. Only `mock` is not a real Kafka."""

    bootstrap_servers: str
    kind: Kind

    @property
    def is_real(self) -> bool:
        """Whether this is an Apache Kafka (or what you named as one), not the stand-in."""
        return self.kind != "mock"


def to_stderr(line: str) -> None:
    """Say a line on standard error."""
    print(f"forebay: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def any_broker(announce: Announce = to_stderr) -> Iterator[Broker]:
    """Yield the first broker of the ladder that works, and stop what was started for it at the end."""
    with ExitStack() as stack:
        yield find_broker(stack, announce)


def find_broker(stack: ExitStack, announce: Announce = to_stderr) -> Broker:
    """Return the first broker of the ladder that works; closing `stack` stops it.

    Every rung that does not hold is announced with its reason. A broker that you named is the only one tried.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named:
        _insist_on(named)
        return Broker(named, "configured")
    for kind, rung in RUNGS:
        try:
            return Broker(stack.enter_context(rung(announce)), kind)
        except ForebayError as error:
            announce(f"no {kind} broker: {str(error).splitlines()[0]}")
    raise KafkaUnavailableError(f"no broker could be started here; start a Kafka and name it in {VARIABLE}")


@contextlib.contextmanager
def _embedded(announce: Announce) -> Iterator[str]:
    with EmbeddedKafka(announce=announce) as kafka:
        yield kafka.bootstrap_servers


@contextlib.contextmanager
def _mock(announce: Announce) -> Iterator[str]:
    from forebay.stream import mock

    with mock.mock_cluster() as servers:
        announce("using librdkafka's mock cluster, a stand-in inside this process: it is not Apache Kafka")
        yield servers


RUNGS: list[tuple[Kind, Callable[[Announce], AbstractContextManager[str]]]] = [
    ("embedded", _embedded),
    ("container", container_broker),
    ("mock", _mock),
]


def _insist_on(servers: str) -> None:
    """Refuse a named broker that nobody listens at: to go on with another one would surprise whoever named it."""
    for server in servers.split(","):
        host, _, port = server.strip().rpartition("://")[2].rpartition(":")
        with contextlib.suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), 5):
            return
    raise KafkaUnavailableError(f"{VARIABLE} names {servers}, where nothing listens; start it or unset the variable")
