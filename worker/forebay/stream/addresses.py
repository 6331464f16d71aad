"""Try the addresses of brokers by themselves, without a Kafka client: why one cannot be connected to, in plain words.

Blocks the caller's thread within its time limits. Never used by the loop.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """A host and port, and what went wrong when connecting to it, None if nothing did."""

    host: str
    port: int
    error: str | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def connect_to(servers: str, timeout: float = 3.0) -> list[Address]:
    """Try to open a TCP connection to each of `host:port,host:port`."""
    return [probe(*_split(server), timeout) for server in servers.split(",") if server.strip()]


def probe(host: str, port: int, timeout: float = 3.0) -> Address:
    """Try to open a TCP connection."""
    try:
        socket.create_connection((host, port), timeout=timeout).close()
    except socket.gaierror:
        return Address(host, port, "the name does not resolve")
    except TimeoutError:
        return Address(host, port, f"no answer within {timeout:g} s: a firewall, or a wrong address")
    except (OSError, OverflowError) as error:
        return Address(host, port, (getattr(error, "strerror", None) or str(error)).lower())
    return Address(host, port)


def _split(server: str) -> tuple[str, int]:
    host, _, port = server.strip().rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return server.strip(), 9092
    return host.strip("[]"), int(port)
