"""What can be asked of a cluster from outside a worker's loop: topics, readiness, offsets.

Plain functions that take a librdkafka configuration and block up to their time-out, on whatever thread calls them;
each makes a client of its own and lets it go. The loop never calls them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    ShareConsumer,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # it does not say what it exports
    AdminClient,
    ClusterMetadata,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from forebay.errors import ConfigError, KafkaUnavailableError
from forebay.stream import mock
from forebay.stream.asking import Config, retrying, unavailable
from forebay.stream.reaching import OnWait, metadata
from forebay.stream.troubles import topic_missing

Partition = tuple[str, int]
TIMEOUT_SECONDS = 15.0


class Connection(AdminClient):
    """An admin client that keeps what it complained about last."""

    def __init__(self, config: Config) -> None:
        self.complaints: deque[KafkaError] = deque(maxlen=50)
        super().__init__(dict(config) | {"error_cb": self.complaints.append})


def connect(config: Config) -> Connection:
    """Make an admin client that writes nothing to standard error. Raises ConfigError for an unknown property."""
    quiet: dict[str, Any] = {"log_level": 0, "reconnect.backoff.max.ms": 500}
    try:
        return Connection(quiet | dict(config))
    except KafkaException as error:
        raise ConfigError(f"the Kafka client refuses the settings, see kafka.client: {error.args[0].str()}") from error


def wait_until_ready(
    config: Config, brokers: int = 1, timeout_seconds: float = 60.0, check: Callable[[], None] = lambda: None
) -> None:
    """Return once `brokers` brokers are registered; `check` may raise between two questions to end the wait early."""
    client = connect(config)
    deadline = time.monotonic() + timeout_seconds
    last = "no answer"
    while time.monotonic() < deadline:
        check()
        try:
            found = len(client.list_topics(timeout=2.0).brokers)
            if found >= brokers:
                return
            last = f"{found} of {brokers} brokers are there"
        except KafkaException as error:
            last = error.args[0].str()
        time.sleep(0.05)
    raise KafkaUnavailableError(f"Kafka at {config['bootstrap.servers']} is not ready: {last}")


def create_topics(
    config: Config,
    topics: Mapping[str, int],
    *,
    replication: int = -1,
    topic_config: Mapping[str, str] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[str]:
    """Create the topics (name to partitions) and wait until every partition has a leader.

    Topics that exist stay as they are; the names of those that were made are returned. `replication` -1 takes the
    cluster's default. The mock cluster gives every topic its own number of partitions, whatever is asked for.
    """
    if not topics:
        return []
    client = connect(config)
    before = _metadata(client, config, timeout_seconds)
    if mock.is_mock(before):
        return mock.make_topics(client, [name for name in topics if name not in before.topics], timeout_seconds)
    wanted = [NewTopic(name, count, replication, config=dict(topic_config or {})) for name, count in topics.items()]
    made = []
    limits = {"operation_timeout": timeout_seconds, "request_timeout": timeout_seconds}
    for name, future in client.create_topics(wanted, **limits).items():
        try:
            future.result()
            made.append(name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise ConfigError(f"topic {name} cannot be created: {error.args[0].str()}") from error
    _await_leaders(client, config, topics, timeout_seconds)
    return made


def delete_topics(config: Config, names: Sequence[str], timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Delete the topics; those that do not exist are passed over."""
    if not names:
        return
    client = connect(config)  # held: a client that is let go fails its own futures
    if mock.is_mock(_metadata(client, config, timeout_seconds)):
        return
    for name, future in client.delete_topics(list(names), operation_timeout=timeout_seconds).items():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise ConfigError(f"topic {name} cannot be deleted: {error.args[0].str()}") from error


def partition_counts(
    config: Config, timeout_seconds: float = TIMEOUT_SECONDS, on_wait: OnWait | None = None
) -> dict[str, int]:
    """Return every topic that this client may see, with its number of partitions.

    With `on_wait`, which is told why, a Kafka that comes up within the time-out is waited for.
    """
    return _counts(connect(config), config, timeout_seconds, on_wait)


def end_offsets(
    config: Config, topics: Iterable[str], *, committed_only: bool = False, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[Partition, int]:
    """Return the offset after the last record of each partition of `topics`.

    `committed_only` gives the last stable offset: what a `read_committed` reader can reach.
    """
    return _offsets(config, topics, OffsetSpec.latest(), committed_only, timeout_seconds)  # type: ignore[no-untyped-call]


def begin_offsets(
    config: Config, topics: Iterable[str], *, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[Partition, int]:
    """Return the first offset that each partition of `topics` still has."""
    return _offsets(config, topics, OffsetSpec.earliest(), False, timeout_seconds)  # type: ignore[no-untyped-call]


def committed_offsets(
    config: Config, group: str, topics: Iterable[str], timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[Partition, int]:
    """Return what the group has committed, by partition; partitions without a commit are not in it."""
    # Asked through a consumer that never joins: the admin client's list_consumer_group_offsets does not retry while
    # the coordinator loads, and in confluent-kafka 2.16.1 that error can end the process (segmentation fault).
    counts = partition_counts(config, timeout_seconds)
    places = [TopicPartition(name, number) for name in topics for number in range(counts.get(name, 0))]
    consumer = Consumer({"log_level": 0, **config, "group.id": group, "enable.auto.commit": False})
    try:
        found = retrying(lambda left: consumer.committed(places, timeout=left), timeout_seconds) if places else []
    except KafkaException as error:
        raise unavailable(config, error) from error
    finally:
        consumer.close()
    return {(place.topic, place.partition): place.offset for place in found if place.offset >= 0}


def refuse_bad_properties(consumer: Config, producer: Config) -> None:
    """Raise ConfigError where the client does not take a property; better now than after a model was loaded."""
    quiet = {"log_level": 0, "error_cb": lambda error: None}
    try:
        Producer({**producer, **quiet}).purge()
        make = ShareConsumer if "share.acknowledgement.mode" in consumer else Consumer
        make({**consumer, **quiet}).close()
    except (KafkaException, ValueError, TypeError) as error:
        said = error.args[0].str() if isinstance(error, KafkaException) else error
        raise ConfigError(f"kafka.client: the Kafka client refuses it: {said}") from error


def wake_coordinator(config: Config, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Let a new cluster make its offsets topic, which the first group otherwise waits three seconds for."""
    consumer = Consumer({"log_level": 0, **config, "group.id": "forebay.wake", "enable.auto.commit": False})
    try:
        retrying(lambda left: consumer.committed([TopicPartition("forebay.wake", 0)], timeout=left), timeout_seconds)
    except KafkaException as error:
        raise unavailable(config, error) from error
    finally:
        consumer.close()


def message_limits(config: Config, topics: Iterable[str], timeout_seconds: float = 5.0) -> dict[str, int]:
    """Return the largest message in bytes of each topic; empty where this client may not, or cannot, read that."""
    limits: dict[str, int] = {}
    for topic in topics:
        try:
            limits[topic] = int(topic_settings(config, topic, timeout_seconds)["max.message.bytes"])
        except (KafkaUnavailableError, KeyError, ValueError):
            break
    return limits


def topic_settings(config: Config, topic: str, timeout_seconds: float = TIMEOUT_SECONDS) -> dict[str, str]:
    """Return the topic's configuration as the broker applies it."""
    resource = ConfigResource(ResourceType.TOPIC, topic)
    client = connect(config)
    future = client.describe_configs([resource], request_timeout=timeout_seconds)[resource]
    try:
        return {name: entry.value for name, entry in future.result().items()}
    except KafkaException as error:
        raise unavailable(config, error) from error


def _offsets(
    config: Config, topics: Iterable[str], spec: Any, committed_only: bool, timeout_seconds: float
) -> dict[Partition, int]:
    client = connect(config)
    counts = _counts(client, config, timeout_seconds)
    names = list(topics)
    missing = [name for name in names if name not in counts]
    if missing:
        raise ConfigError(topic_missing(missing[0], str(config["bootstrap.servers"])))
    wanted = {TopicPartition(name, number): spec for name in names for number in range(counts[name])}
    if not wanted:
        return {}
    isolation = IsolationLevel.READ_COMMITTED if committed_only else IsolationLevel.READ_UNCOMMITTED

    def ask(left: float) -> dict[Partition, int]:
        futures = client.list_offsets(wanted, isolation_level=isolation, request_timeout=left)
        return {(place.topic, place.partition): future.result().offset for place, future in futures.items()}

    try:
        return retrying(ask, timeout_seconds)
    except KafkaException as error:
        raise unavailable(config, error) from error


def _counts(
    client: Connection, config: Config, timeout_seconds: float, on_wait: OnWait | None = None
) -> dict[str, int]:
    topics = _metadata(client, config, timeout_seconds, on_wait).topics
    return {name: len(topic.partitions) for name, topic in topics.items()}


def _metadata(
    client: Connection, config: Config, timeout_seconds: float, on_wait: OnWait | None = None
) -> ClusterMetadata:
    servers, deadline = str(config.get("bootstrap.servers")), time.monotonic() + timeout_seconds
    found: ClusterMetadata = metadata(client, servers, client.complaints, deadline, on_wait=on_wait)
    return found


def _await_leaders(client: Connection, config: Config, topics: Mapping[str, int], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while True:
        seen = _metadata(client, config, timeout_seconds).topics
        found = [list(seen[name].partitions.values()) if name in seen else [] for name in topics]
        if all(partitions and all(part.leader >= 0 for part in partitions) for partitions in found):
            return
        if time.monotonic() > deadline:
            raise KafkaUnavailableError(f"{', '.join(topics)}: still no leader after {timeout_seconds:.0f} s")
        time.sleep(0.02)
