"""Whether the brokers that lead some topics are well: they answer, and every copy of each partition is in step.

Asked by the watchdog on acknowledgements alone, when nothing has moved for long: it may block its thread for a moment.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import confluent_kafka as ck


def are_well(client: Any, topics: Iterable[str], timeout: float) -> bool:
    """Ask the leaders of these topics for an offset, through any client that is connected; False where one is silent.

    A partition without a leader, or with copies that lag behind, may have to wait for its brokers: that is not well.
    """
    deadline = time.monotonic() + timeout
    try:
        for topic in topics:
            found = client.list_topics(topic, timeout=max(deadline - time.monotonic(), 0.05)).topics[topic]
            partitions = found.partitions.values()
            if found.error is not None or not partitions:
                return False
            if any(p.leader < 0 or len(p.isrs) < len(p.replicas) for p in partitions):
                return False
            for partition in {p.leader: p.id for p in partitions}.values():
                place = ck.TopicPartition(topic, partition)
                client.get_watermark_offsets(place, timeout=max(deadline - time.monotonic(), 0.05))
    except ck.KafkaException:
        return False
    return True
