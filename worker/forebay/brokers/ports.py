"""Ports on loopback for brokers: free now, and likely to stay so while a broker is down."""

from __future__ import annotations

import random
import socket

from forebay.brokers.properties import HOST, NodeAddress
from forebay.errors import KafkaUnavailableError, UsageError

# Below Linux's ephemeral ports (32768 and up): while a broker is down, a client that reconnects to an ephemeral port
# can be given that very port as its own, connect to itself, and keep the broker from coming back.
_PORTS = range(20_000, 32_000)


def addresses(brokers: int, port: int) -> list[NodeAddress]:
    """Choose where each node listens; raises UsageError if `port`, or one of those that follow it, is taken."""
    taken: set[int] = set()
    fixed = range(port, port + brokers) if port else ()
    for wanted in fixed:
        if wanted > 65_535 or not is_free(wanted):
            raise UsageError(f"port {wanted} is taken; choose another with --port, or none for a free one")
        taken.add(wanted)
    broker_ports = list(fixed) or [free_port(taken) for _ in range(brokers)]
    return [
        NodeAddress(number, broker_port, free_port(taken)) for number, broker_port in enumerate(broker_ports, start=1)
    ]


def free_port(taken: set[int] | None = None) -> int:
    """Return a port that nothing uses on loopback now, and note it in `taken`, whose ports it avoids."""
    taken = set() if taken is None else taken
    for candidate in random.sample(_PORTS, k=500):
        if candidate not in taken and is_free(candidate):
            taken.add(candidate)
            return candidate
    raise KafkaUnavailableError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def is_free(port: int) -> bool:
    """Whether a broker could listen on the port now; one that another broker has just left counts as free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def listens(port: int) -> bool:
    """Whether anything accepts connections on the port."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((HOST, port)) == 0
