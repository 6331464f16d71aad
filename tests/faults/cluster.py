"""Three brokers for a test to bounce, one after the other, and when all their replicas are in sync again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient  # type: ignore[attr-defined]

from forebay.broker import EmbeddedKafka
from forebay.errors import ForebayError
from tests.kafka_probe import KafkaProbe, eventually

BROKERS = 3


class Cluster:
    """Three brokers, numbered from 0 as `EmbeddedKafka` does it; every topic has a replica on each."""

    def __init__(self, kafka: EmbeddedKafka) -> None:
        self.kafka = kafka
        self.probe = KafkaProbe(kafka.bootstrap_servers)
        self._admin = AdminClient({**self.probe.config, "topic.metadata.refresh.interval.ms": 1000})

    def bounce(self, broker: int, *, hard: bool) -> None:
        """Stop a broker in order, or kill it, and start it again; returns once it answers."""
        if hard:
            self.kafka.kill(broker)
        else:
            self.kafka.stop_broker(broker)
        self.kafka.restart(broker)

    def await_in_sync(self, *topics: str) -> None:
        """Return once every partition has all of its replicas in sync."""

        def in_sync() -> bool:
            with contextlib.suppress(KafkaException, ForebayError, KeyError):
                known = self._admin.list_topics(timeout=5).topics
                parts = [part for topic in topics for part in known[topic].partitions.values()]
                return all(len(part.isrs) == BROKERS and part.leader >= 0 for part in parts)
            return False

        eventually(in_sync, f"all replicas of {', '.join(topics)} are in sync", 90, 0.2)


@contextlib.contextmanager
def three_brokers() -> Iterator[Cluster]:
    """Start three brokers and stop them at the end."""
    with EmbeddedKafka(BROKERS) as kafka:
        yield Cluster(kafka)
