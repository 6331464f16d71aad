"""The configuration of an embedded broker: pure text, so that a test can read what a broker is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where one combined broker and controller listens. `number` is its node id, from 1."""

    number: int
    port: int
    controller_port: int

    @property
    def server(self) -> str:
        """The broker as a bootstrap server."""
        return f"{HOST}:{self.port}"


def server_properties(
    node: NodeAddress, cluster: Sequence[NodeAddress], folder: Path, extra: Mapping[str, str]
) -> dict[str, str]:
    """Return the properties of `node`; `extra` wins."""
    replicas = str(min(3, len(cluster)))
    in_sync = str(min(2, len(cluster) - 1) or 1)
    quick = {
        # Small: a broker for tests has few partitions, and the cleaner's default buffer alone is 128 MB.
        "num.network.threads": "2",
        "num.io.threads": "4",
        "num.recovery.threads.per.data.dir": "1",
        "log.cleaner.dedupe.buffer.size": "4194304",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.num.partitions": "4",
        # Prompt: waits that protect a production cluster only slow a test down.
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "500",
        "group.consumer.min.session.timeout.ms": "500",
        "group.consumer.min.heartbeat.interval.ms": "100",
        "group.consumer.session.timeout.ms": "10000",
        "group.consumer.heartbeat.interval.ms": "500",
        "group.share.min.session.timeout.ms": "500",
        "group.share.min.heartbeat.interval.ms": "100",
        "group.share.session.timeout.ms": "10000",
        "group.share.heartbeat.interval.ms": "500",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
        "controller.quorum.election.timeout.ms": "500",
        "controller.quorum.fetch.timeout.ms": "2000",
        "broker.session.timeout.ms": "6000",
    }
    return {
        "process.roles": "broker,controller",
        "node.id": str(node.number),
        "controller.quorum.voters": ",".join(f"{peer.number}@{HOST}:{peer.controller_port}" for peer in cluster),
        "listeners": f"PLAINTEXT://{node.server},CONTROLLER://{HOST}:{node.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{node.server}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(folder / "logs"),
        "auto.create.topics.enable": "false",
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
        **quick,
        **extra,
    }


def as_text(properties: Mapping[str, str]) -> str:
    """Return the properties as a Java properties file."""
    return "".join(f"{key}={value}\n" for key, value in properties.items())


LOGGING = """\
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %-5p %c{1}: %m%n
"""
"""Kafka's log settings (log4j 2): what a person needs to see and no more."""

LOGGING_3 = """\
log4j.rootLogger=WARN, console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %-5p %c{1}: %m%n
"""
"""The same for Kafka 3 (log4j 1)."""
