"""What every command and the client say when Kafka does not answer, or a topic is not there, each with its mend.

Pure sentences; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

CLOSED_AT_ONCE = (
    "connections are closed again at once; a broker that wants TLS or a login does that: see kafka.security"
)
SILENT = (
    "something takes the connection and answers nothing in time; so does a broker that wants TLS: see kafka.security"
)
NO_ANSWER = "no answer in time"
_HERE = ("localhost", "127.", "[::1]", "0.0.0.0")
_VAGUE = ("Broker transport failure", "Timed out", "All broker connections are down", "Failed to get metadata")
"""What librdkafka says when it does not know why; a person learns nothing from it."""


def unreachable(servers: str, why: str | None) -> str:
    """Say that nothing answers at `servers`, why, and what to do. `why` is a cause in anyone's words, or None."""
    cause = NO_ANSWER if why is None else plain_cause(why)
    told = f"Kafka does not answer at {servers} ({cause})"
    return told if cause in (CLOSED_AT_ONCE, SILENT) else f"{told}: {mend(servers)}"


def is_about_tls(why: str) -> bool:
    """Whether a connection failed in TLS: an alert of the other side reaches the client as a mere failure to read."""
    return "SSL routines" in why


def login_refused(why: str) -> str:
    """Say that brokers do not let a client in, or that it does not trust them, and the mend."""
    return (
        f"the login or TLS fails ({plain_cause(why)}); if this worker's password or certificate was changed or has "
        "expired, start it again with the new one (for a password in a file SIGHUP is enough, except in queue mode)"
    )


def mend(servers: str) -> str:
    """Say how to get a Kafka to answer at `servers`."""
    command = broker_command(servers)
    if servers.strip().rpartition("://")[2].startswith(_HERE):
        return f"start it (for development: {command}), or set kafka.bootstrap_servers"
    port = command.rpartition(" ")[2]
    return f"start it, or set kafka.bootstrap_servers (for development: localhost:{port}, started by {command})"


def broker_command(servers: str) -> str:
    """Give the command that starts a development broker at the port of the first of `servers`."""
    port = servers.partition(",")[0].strip().rpartition("]")[2].rpartition(":")[2]
    return f"forebay broker --port {port if port.isascii() and port.isdigit() else 9092}"


def plain_cause(why: str) -> str:
    """Take librdkafka's wrapping off a cause: `h:9/bootstrap: Connect to … failed: Connection refused (after …)`."""
    if why in (CLOSED_AT_ONCE, SILENT):
        return why
    cause = re.sub(r"\s*\(after \d+ms in state .*", "", why)
    cause = re.sub(r"\s*\(_[A-Z_]+\)", "", cause)
    cause = re.sub(r"^\S+:\d+/\w+: ", "", cause)
    cause = re.sub(r"^Connect to \S+ failed: ", "", cause)
    cause = re.sub(r"^Failed to resolve '[^']*': .*", "the name does not resolve", cause)
    if re.match(r"^Send failed: (Broken pipe|Connection reset by peer)", cause):  # closed before it had said a word
        return CLOSED_AT_ONCE
    if any(vague in cause for vague in _VAGUE):
        return NO_ANSWER
    return cause if cause[1:2].isupper() else cause[:1].lower() + cause[1:]  # SSL and SASL stay as they are


def topic_missing(topic: str, servers: str) -> str:
    """Say that a topic does not exist, and both commands that make it."""
    return (
        f"topic {topic} does not exist at {servers}; create it: forebay topics with the worker's --config (or with "
        f"--topic {topic}), or {kafka_topics(topic, servers)}"
    )


def kafka_topics(topic: str, servers: str, partitions: int = 6) -> str:
    """Give the command of Apache Kafka's own tools that makes a topic."""
    return f"kafka-topics.sh --bootstrap-server {servers} --create --topic {topic} --partitions {partitions}"


def reset_offsets(group: str, servers: str, partitions: Iterable[tuple[str, int]]) -> str:
    """Give the command of Apache Kafka's own tools that moves a group to the first record that is still there."""
    numbers: dict[str, list[str]] = {}
    for topic, number in sorted(partitions):
        numbers.setdefault(topic, []).append(str(number))
    topics = " ".join(f"--topic {topic}:{','.join(found)}" for topic, found in numbers.items())
    return (
        f"kafka-consumer-groups.sh --bootstrap-server {servers} --group {group} {topics} --reset-offsets --to-earliest "
        "--execute"
    )
