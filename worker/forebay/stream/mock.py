"""librdkafka's built-in mock cluster: the last rung of the broker ladder, a stand-in and not Apache Kafka.

It runs on threads of librdkafka in this process, and other processes on loopback can join. It has no transactions
worth the name and keeps 5 MB per partition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ClusterMetadata  # type: ignore[attr-defined]  # it exports without saying

TIMEOUT_SECONDS = 10.0


@contextlib.contextmanager
def mock_cluster(brokers: int = 1) -> Iterator[str]:
    """Run a mock cluster and yield its bootstrap servers; it lives until the block ends."""
    client = Producer({"test.mock.num.brokers": brokers, "log_level": 0})
    nodes = client.list_topics(timeout=TIMEOUT_SECONDS).brokers.values()
    yield ",".join(f"{node.host}:{node.port}" for node in nodes)
    client.flush(0)  # also keeps the client, and with it the cluster, referenced until here


def is_mock(cluster: ClusterMetadata) -> bool:
    """Whether the metadata come from a mock cluster."""
    return str(cluster.cluster_id).startswith("mockCluster")


def make_topics(client: AdminClient, names: Sequence[str], timeout_seconds: float) -> list[str]:
    """Make topics of four partitions each: it has no create-topics request, but makes what it is asked about."""
    for name in names:
        client.list_topics(name, timeout=timeout_seconds)
    return list(names)
