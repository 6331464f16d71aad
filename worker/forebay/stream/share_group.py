"""The settings of a share group, which are the group's and not the client's: read at the start, and set where needed.

Asks the cluster from outside a worker's loop, as `admin` does. What is set is what the promises rest on: where the
group begins, that requests of aborted transactions are not answered, locks that outlast a batch, and enough deliveries.
"""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # it does not say what it exports
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from forebay.errors import ConfigError
from forebay.settings import Settings
from forebay.stream.admin import TIMEOUT_SECONDS, connect
from forebay.stream.asking import Config, retrying, unavailable
from forebay.stream.share_consumer import Sharing

LOCK = "share.record.lock.duration.ms"
LIMIT = "share.delivery.count.limit"
START = "share.auto.offset.reset"
ISOLATION = "share.isolation.level"

_KAFKAS_LIMIT = 5
"""What Apache Kafka 4.2 allows by default, where only the broker knows and this client may not ask it."""

_DENIED = {
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
}
_REFUSED = {KafkaError.INVALID_CONFIG, KafkaError.POLICY_VIOLATION, KafkaError.INVALID_REQUEST}


def wanted_of(settings: Settings, found: Mapping[str, str]) -> dict[str, str]:
    """Return what has to change in a group's settings: locks and deliveries only ever grow."""
    kafka, delivery = settings.kafka, settings.delivery
    lock, limit = 2 * settings.inference.execution_timeout_ms, delivery.max_attempts + 2
    wanted = {START: kafka.auto_offset_reset, ISOLATION: "read_committed"}
    changes = {key: value for key, value in wanted.items() if found.get(key) != value}
    if int(found[LOCK]) < lock:
        changes[LOCK] = str(lock)
    if int(found.get(LIMIT, _KAFKAS_LIMIT)) < limit:
        changes[LIMIT] = str(limit)
    return changes


def agree(
    config: Config, settings: Settings, timeout_seconds: float = TIMEOUT_SECONDS
) -> tuple[Sharing, dict[str, str]]:
    """Bring a group's settings to what this worker needs; return the terms, and what was changed.

    Raises ConfigError, with the mend, where this Kafka has no share groups, or where the change is refused.
    """
    found, changes = look(config, settings, timeout_seconds)
    if LIMIT in changes and LIMIT not in found:
        raise ConfigError(
            f"delivery.share_group: with delivery.max_attempts {settings.delivery.max_attempts} the broker's "
            f"group.share.delivery.count.limit has to be {changes[LIMIT]} or more, and this Kafka does not have it by "
            "group: lower delivery.max_attempts to 3 or less"
        )
    if changes:
        _change(config, settings.kafka.group_id, changes, timeout_seconds)
    now = {**found, **changes}
    return Sharing(int(now[LOCK]) / 1000, int(now.get(LIMIT, _KAFKAS_LIMIT))), changes


def look(
    config: Config, settings: Settings, timeout_seconds: float = TIMEOUT_SECONDS
) -> tuple[dict[str, str], dict[str, str]]:
    """Return a group's settings, and what a worker would change in them. Raises ConfigError as `agree` does."""
    found = _read(config, settings.kafka.group_id, timeout_seconds)
    if LOCK not in found or START not in found:
        raise ConfigError("delivery.share_group: this Kafka has no share groups; they need Apache Kafka 4.2 or newer")
    return found, wanted_of(settings, found)


def command(servers: str, group: str, changes: Mapping[str, str]) -> str:
    """Give the command of Apache Kafka's own tools that sets them."""
    told = ",".join(f"{key}={value}" for key, value in changes.items())
    return (
        f"kafka-configs.sh --bootstrap-server {servers} --alter --entity-type groups --entity-name {group} "
        f"--add-config {told}"
    )


def _read(config: Config, group: str, timeout_seconds: float) -> dict[str, str]:
    client = connect(config)
    resource = ConfigResource(ResourceType.GROUP, group)

    def ask(left: float) -> dict[str, str]:
        future = client.describe_configs([resource], request_timeout=left)[resource]
        return {name: str(entry.value) for name, entry in future.result().items()}

    try:
        return retrying(ask, timeout_seconds)
    except KafkaException as error:
        if error.args[0].code() in _DENIED:
            raise ConfigError(
                f"delivery.share_group: the settings of the group {group} may not be read ({error.args[0].str()}), and "
                "what is promised rests on them: grant the rights that forebay acls prints"
            ) from error
        if error.args[0].code() in _REFUSED:
            raise ConfigError(
                f"delivery.share_group: this Kafka has no settings of groups ({error.args[0].str()}); share groups "
                "need Apache Kafka 4.2 or newer"
            ) from error
        raise unavailable(config, error) from error


def _change(config: Config, group: str, changes: Mapping[str, str], timeout_seconds: float) -> None:
    client = connect(config)
    entries = [ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in changes.items()]
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
    try:
        client.incremental_alter_configs([resource], request_timeout=timeout_seconds)[resource].result()
    except KafkaException as error:
        failure, told = error.args[0], command(str(config["bootstrap.servers"]), group, changes)
        if failure.code() in _DENIED:
            raise ConfigError(
                f"delivery.share_group: this client may not change the group {group} ({failure.str()}): grant it "
                f"AlterConfigs (see forebay acls), or let somebody run: {told}"
            ) from error
        if failure.code() in _REFUSED:
            raise ConfigError(
                f"delivery.share_group: the broker refuses {dict(changes)} for the group {group} ({failure.str()}): a "
                "lock has to last twice inference.execution_timeout_ms, and delivery.max_attempts takes two deliveries "
                "more: lower those, or raise the broker's bounds"
            ) from error
        raise unavailable(config, error) from error
