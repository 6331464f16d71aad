"""What `forebay check` asks of a cluster: addresses, brokers, topics, permissions. Reads only; changes nothing.

Blocks the caller's thread within its time limits. Never used by the loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from forebay.settings import Kafka
from forebay.stream.addresses import Address
from forebay.stream.client_config import client_config
from forebay.stream.publish import QUIET
from forebay.stream.reaching import RefusedError, metadata


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic as it is; `rights` are what this client may do, None where the broker does not say."""

    name: str
    partitions: int = 0
    replication: int = 0
    rights: frozenset[str] | None = None
    error: str | None = None


@dataclass(slots=True)
class Cluster:
    """A connection for questions. `open` first."""

    kafka: Kafka
    timeout: float = 10.0
    brokers: list[Address] = field(default_factory=list)
    topics: set[str] = field(default_factory=set)
    _client: Any = None
    _errors: list[KafkaError] = field(default_factory=list)

    def open(self) -> None:
        """Connect, log in, and list brokers and topics. Raises RefusedError or KafkaUnavailableError."""
        config = client_config(self.kafka) | {"logger": QUIET, "error_cb": self._errors.append}
        self._client = AdminClient(config)
        found = metadata(self._client, self.kafka.bootstrap_servers, self._errors, time.monotonic() + self.timeout)
        self.brokers = [Address(broker.host, broker.port) for broker in found.brokers.values()]
        self.topics = set(found.topics)

    def describe(self, name: str) -> TopicState:
        """Describe a topic, with what this client may do to it."""
        try:
            future = self._client.describe_topics(
                TopicCollection([name]), include_authorized_operations=True, request_timeout=self.timeout
            )[name]
            found = future.result()
        except KafkaException as error:
            return TopicState(name, error=error.args[0].name())
        replication = min((len(partition.replicas) for partition in found.partitions), default=0)
        return TopicState(name, len(found.partitions), replication, _rights(found.authorized_operations))

    def group_rights(self) -> frozenset[str] | None:
        """Give what this client may do to the consumer group, None where the broker does not say.

        Raises RefusedError if it may not even look.
        """
        group = self.kafka.group_id
        try:
            future = self._client.describe_consumer_groups(
                [group], include_authorized_operations=True, request_timeout=self.timeout
            )[group]
            return _rights(future.result().authorized_operations)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                raise RefusedError(error.args[0].str()) from error
            return None


def _rights(operations: Sequence[Any] | None) -> frozenset[str] | None:
    return None if operations is None else frozenset(operation.name for operation in operations)
