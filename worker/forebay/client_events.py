"""What the Kafka client reports beside records, told to the outside: metrics, health, and log lines that do not flood.

On the corridor's thread; costs per event, and there is none while all is well but for ends of partitions.
"""

from __future__ import annotations

from typing import NamedTuple

from forebay.health import Health
from forebay.logs import logger
from forebay.metrics import Metrics
from forebay.records import Partition
from forebay.stream.member import Event, Member

_SAME_EVENT_EVERY = 10.0
_log = logger("worker")


class End(NamedTuple):
    """A partition that was read to its end: the offset behind everything in it, markers included."""

    partition: Partition
    offset: int


class ClientEvents:
    """The events of one consumer."""

    def __init__(self, metrics: Metrics, health: Health, consumer: Member) -> None:
        self._metrics = metrics
        self._health = health
        self._consumer = consumer
        self._told: dict[str, float] = {}

    def take(self, now: float) -> list[End]:
        """Take in what the client reported; return the partitions that were read to their end."""
        ends: list[End] = []
        while self._consumer.events:
            event = self._consumer.events.popleft()
            if not event.is_end:
                self._tell(event, now)
            elif event.partition is not None and event.offset is not None:
                ends.append(End(event.partition, event.offset))
        return ends

    def _tell(self, event: Event, now: float) -> None:
        """Count an event; the same one is logged once in a while, what was skipped in a partition each time."""
        if event.skipped and event.partition is not None:
            topic, number = event.partition
            self._metrics.skipped.labels(topic, str(number)).inc(event.skipped)
            _log.warning("requests_skipped", requests=event.skipped, why=event.message)
            return
        self._metrics.events.labels(event.name).inc()
        self._health.trouble("kafka", f"{event.name}: {event.message}")
        if now - self._told.get(event.name, -_SAME_EVENT_EVERY) >= _SAME_EVENT_EVERY:
            self._told[event.name] = now
            where = f"{event.partition.topic}/{event.partition.partition}" if event.partition else None
            _log.warning("kafka_event", name=event.name, message=event.message, partition=where)
