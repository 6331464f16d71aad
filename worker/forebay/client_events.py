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
from forebay.stream.throttling import Throttling
from forebay.stream.troubles import is_about_tls, login_refused

_SAME_EVENT_EVERY = 10.0
_NO_LOGIN = ("_AUTHENTICATION", "_SSL")
_VAGUE = "_ALL_BROKERS_DOWN"
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
        if event.name != _VAGUE or "kafka" not in self._health.troubles:  # it comes behind the cause, and hides it
            is_login = event.name in _NO_LOGIN or is_about_tls(event.message)
            told = login_refused(event.message) if is_login else event.message
            self._health.trouble("kafka", f"{event.name}: {told}")
        if self.is_due(event.name, now):
            where = f"{event.partition.topic}/{event.partition.partition}" if event.partition else None
            _log.warning("kafka_event", name=event.name, message=event.message, partition=where)

    def throttled(self, throttling: Throttling, now: float) -> None:
        """Count what quotas held up: nothing is wrong with the worker, and nobody could see why it is slow."""
        held: dict[str, float] = {}
        while throttling.waits:
            wait = throttling.waits.popleft()
            held[wait.client] = held.get(wait.client, 0.0) + wait.seconds
            if self.is_due(f"throttled {wait.client}", now):
                asked = round(wait.seconds, 3)
                _log.warning("throttled", client=wait.client, broker=wait.broker, seconds=asked, why="a quota")
        for client, seconds in held.items():
            self._metrics.throttled.labels(client).inc(seconds)

    def is_due(self, name: str, now: float) -> bool:
        """Whether this kind of event is worth a line again; the caller writes it."""
        due = now - self._told.get(name, -_SAME_EVENT_EVERY) >= _SAME_EVENT_EVERY
        if due:
            self._told[name] = now
        return due
