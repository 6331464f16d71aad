"""Settings become librdkafka properties here, and nowhere else; what would break a guarantee is refused."""

from __future__ import annotations

from typing import Any

from forebay.errors import ConfigError
from forebay.settings import Batch, Delivery, Kafka, Security

OWNED = {
    "bootstrap.servers": "kafka.bootstrap_servers",
    "metadata.broker.list": "kafka.bootstrap_servers",
    "group.id": "kafka.group_id",
    "group.protocol": "kafka.group_protocol",
    "auto.offset.reset": "kafka.auto_offset_reset",
    "security.protocol": "kafka.security.protocol",
    "sasl.mechanism": "kafka.security.mechanism",
    "sasl.mechanisms": "kafka.security.mechanism",
    "sasl.username": "kafka.security.username",
    "sasl.password": "kafka.security.password",
    "transactional.id": "delivery.transactional_id",
    "transaction.timeout.ms": "delivery.transaction_timeout_ms",
}
"""Properties that a setting of ours says already."""

REFUSED = {
    "enable.auto.commit": "offsets are committed only after the outcomes are acknowledged",
    "enable.auto.offset.store": "offsets are committed only after the outcomes are acknowledged",
    "auto.commit.interval.ms": "offsets are committed only after the outcomes are acknowledged",
    "acks": "an outcome is safe only when all in-sync replicas have it",
    "request.required.acks": "an outcome is safe only when all in-sync replicas have it",
    "enable.idempotence": "a retried outcome must not appear twice",
    "enable.gapless.guarantee": "a failed outcome is sent again, it must not stop the producer",
    "message.timeout.ms": "an outcome is sent until it is acknowledged",
    "delivery.timeout.ms": "an outcome is sent until it is acknowledged",
    "isolation.level": "requests of aborted transactions must not be answered",
    "delivery.report.only.error": "every acknowledgement is counted",
    "partition.assignment.strategy": "the group must not mix assignors; use kafka.group_protocol",
    "enable.partition.eof": "the worker reads these events itself",
    "share.acknowledgement.mode": "each record is acknowledged after its outcome is",
    "max.poll.records": "the worker's queue says how many records are taken",
    "plugin.library.paths": "it loads code into the worker",
    "ssl.engine.location": "it loads code into the worker",
}
"""Properties that would break a guarantee, and why."""

_CONSUMER_ONLY = ("fetch.", "queued.", "session.", "heartbeat.", "max.poll.", "group.", "check.crcs", "client.rack")
_PRODUCER_ONLY = (
    "linger.",
    "queue.buffering.",
    "batch.",
    "compression.",
    "partitioner",
    "sticky.",
    "message.send.max.retries",
    "retries",
    "max.in.flight",
    "request.timeout.ms",
    "topic.metadata.propagation.max.ms",
)


def client_config(kafka: Kafka) -> dict[str, Any]:
    """Return what every client of this cluster needs: address, security and the user's own properties."""
    extra = _user_properties(kafka)
    shared = {k: v for k, v in extra.items() if not k.startswith(_CONSUMER_ONLY + _PRODUCER_ONLY)}
    return {
        "bootstrap.servers": kafka.bootstrap_servers,
        "client.id": "forebay",
        "topic.metadata.refresh.interval.ms": 30_000,
        "socket.nagle.disable": True,
        **_security(kafka.security),
        **shared,
    }


def consumer_config(kafka: Kafka, batch: Batch) -> dict[str, Any]:
    """Return the worker's consumer properties.

    Where a partition starts is not left to the client: see `starts`.
    End-of-partition events tell where the position stands behind transaction markers and compacted records.
    The client's own prefetch is bounded by the queue's bytes: the default of 64 MiB would double the worker.
    """
    prefetch_kbytes = min(max(batch.max_queue_bytes // 1024, 1024), 32_768)
    config = {
        **client_config(kafka),
        "group.id": kafka.group_id,
        "group.protocol": kafka.group_protocol,
        "auto.offset.reset": "error",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
        "check.crcs": True,  # as Kafka's own clients do: a damaged byte is found, in place of a wrong answer or none
        "fetch.wait.max.ms": 100,
        "fetch.error.backoff.ms": 50,
        "fetch.queue.backoff.ms": 10,  # a full prefetch stops the fetcher this long: 1,000 by default starves the loop
        "fetch.message.max.bytes": min(prefetch_kbytes * 1024 // 4, 1_048_576 * 4),
        "queued.max.messages.kbytes": prefetch_kbytes,
        "queued.min.messages": min(max(2 * batch.queue_size, 10_000), 10_000_000),  # the client takes no more
    }
    if kafka.group_protocol == "classic":
        config |= {
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": 6_000,  # the least that a broker takes by default; takeover is this and a heartbeat
            "heartbeat.interval.ms": 500,
        }
    return {**config, **_user_properties(kafka, _PRODUCER_ONLY)}


def share_config(kafka: Kafka, batch: Batch) -> dict[str, Any]:
    """Return the properties of the worker's clients in queue mode.

    A wave may be worked on for long without a poll: locks watch over its records, so the poll interval need not.
    """
    config = {
        **client_config(kafka),
        "group.id": kafka.group_id,
        "share.acknowledgement.mode": "explicit",
        "max.poll.interval.ms": 86_400_000,
        "fetch.wait.max.ms": 100,
        "fetch.max.bytes": min(max(batch.max_queue_bytes // 3, 1_048_576), 33_554_432),
    }
    return {**config, **_user_properties(kafka, _PRODUCER_ONLY)}


def producer_config(kafka: Kafka, delivery: Delivery) -> dict[str, Any]:
    """Return the worker's producer properties: acknowledged by all replicas, idempotent, sent until acknowledged."""
    config: dict[str, Any] = {
        **client_config(kafka),
        "acks": "all",
        "enable.idempotence": True,
        "message.timeout.ms": 0,
        "linger.ms": 1,
        # While two requests are on their way results gather: a lone one leaves at once, many leave together.
        "max.in.flight.requests.per.connection": 2,
        "queue.buffering.max.messages": 200_000,
        "queue.buffering.max.kbytes": 262_144,
        "message.max.bytes": 67_108_864,
        "partitioner": "murmur2_random",  # so that Java readers find a key in the same partition
        "sticky.partitioning.linger.ms": 0,
        "topic.metadata.propagation.max.ms": 5_000,  # a reply topic that does not exist must hold nobody up
    }
    if delivery.guarantee == "exactly_once":
        config |= {
            "transactional.id": delivery.transactional_id,
            "transaction.timeout.ms": delivery.transaction_timeout_ms,
            "message.timeout.ms": delivery.transaction_timeout_ms,
            "delivery.report.only.error": True,  # a commit says that all were delivered, on a thread beside the loop's
            "retry.backoff.ms": 1,  # the client sleeps this long on CONCURRENT_TRANSACTIONS: 100 by default
            "retry.backoff.max.ms": 5,
        }
    return {**config, **_user_properties(kafka, _CONSUMER_ONLY)}


def _user_properties(kafka: Kafka, without: tuple[str, ...] = ()) -> dict[str, Any]:
    for key in kafka.client:
        if key in OWNED:
            raise ConfigError(f"kafka.client: {key} is set by {OWNED[key]}; remove it from kafka.client")
        if key.endswith("_cb") or key in ("logger", "on_commit", "on_delivery"):
            raise ConfigError(f"kafka.client: {key} is a Python function, which a setting cannot be; remove it")
        if key in REFUSED or key.startswith(("delivery.report", "builtin.features")):
            why = REFUSED.get(key, "it changes how acknowledgements are counted")
            raise ConfigError(f"kafka.client: {key} may not be changed: {why}; remove it")
    return {key: value for key, value in kafka.client.items() if not (without and key.startswith(without))}


def _security(security: Security) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if security.protocol != "plaintext":
        config["security.protocol"] = security.protocol
    if security.mechanism:
        config["sasl.mechanism"] = security.mechanism
    if security.username:
        config["sasl.username"] = security.username
    if security.password:
        config["sasl.password"] = security.password.get_secret_value()
    tls = security.tls
    files = {"ssl.ca.location": tls.ca_file, "ssl.certificate.location": tls.certificate_file}
    files["ssl.key.location"] = tls.key_file
    for key, path in files.items():
        if path is not None:
            if not path.is_file():
                raise ConfigError(f"kafka.security.tls: {path} is not a readable file")
            config[key] = str(path)
    if tls.key_password:
        config["ssl.key.password"] = tls.key_password.get_secret_value()
    if not tls.verify:
        config["enable.ssl.certificate.verification"] = False
    return config
