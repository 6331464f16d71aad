"""Public doubles for tests of a model or of Forebay itself: an in-memory broker with faults, a manual clock, models.

    broker = MemoryBroker({"requests": 1, "results": 1, "dead": 1})
    broker.append("requests", value, key=b"id-1")
    run_to_end(broker, {"model.factory": "my_package.my_module:Classifier"})
    assert broker.records("results")

The worker that `run_to_end` runs is the real one, with its model inline in this process; only Kafka is a double.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forebay.assembly import assemble
from forebay.health import Health
from forebay.metrics import Metrics
from forebay.records import Partition
from forebay.settings import Settings, load
from forebay.stream.client_config import producer_config
from forebay.stream.committer import Committer
from forebay.stream.memory import MemoryBroker, MemoryConsumer, MemoryProducer
from forebay.stream.outbox import Outbox, Outgoing
from forebay.stream.results import Encoder
from forebay.worker import Worker

__all__ = [
    "ManualClock",
    "MemoryBroker",
    "MemoryConsumer",
    "MemoryProducer",
    "make_worker",
    "memory_settings",
    "run_to_end",
]


class ManualClock:
    """A monotonic clock in seconds that only moves when it is told to, or by `step` at each reading."""

    def __init__(self, now: float = 1000.0, step: float = 0.0) -> None:
        self.now = now
        self.step = step

    def __call__(self) -> float:
        """Return the time."""
        self.now += self.step
        return self.now

    def advance(self, seconds: float) -> float:
        """Move on and return the new time."""
        self.now += seconds
        return self.now


def memory_settings(values: Mapping[str, Any]) -> Settings:
    """Return settings for topics `requests`, `results` and `dead`, with the model inline, and `values` on top."""
    base = {
        "kafka.input_topics": "requests",
        "kafka.output_topic": "results",
        "kafka.dead_letter_topic": "dead",
        "inference.executor": "inline",
        "inference.device": "cpu",
    }
    return load(None, {**base, **values})


def make_worker(
    broker: MemoryBroker, settings: Settings, search: Path | None = None, clock: Callable[[], float] | None = None
) -> tuple[Worker, MemoryConsumer, MemoryProducer]:
    """Return a worker on an in-memory broker, not started, with its doubles."""
    consumer, producer = MemoryConsumer(broker, settings.kafka.input_topics), MemoryProducer(broker)
    config = producer_config(settings.kafka, settings.delivery)
    interval, remembers = settings.delivery.commit_interval_ms / 1000, settings.delivery.order_of_results == "none"

    def make_outbox(encoder: Encoder) -> Outgoing:
        dead_letter_topic = settings.kafka.dead_letter_topic
        ordering = settings.delivery.ordering
        return Outbox(config, encoder, dead_letter_topic, make_client=lambda *_, **__: producer, ordering=ordering)

    rooms = assemble(
        settings,
        [search or Path.cwd()],
        consumer=consumer,
        make_outbox=make_outbox,
        make_committer=lambda _, offsets: Committer(consumer, offsets, interval, remembers=remembers),
    )
    return Worker(settings, rooms, Metrics(), Health(), clock or time.monotonic), consumer, producer


def run_to_end(broker: MemoryBroker, values: Mapping[str, Any], search: Path | None = None) -> Worker:
    """Run a worker until everything in `requests` is answered and committed."""
    settings = memory_settings(values)
    worker, _, _ = make_worker(broker, settings, search)
    ends = {
        Partition(topic, number): len(log)
        for topic in settings.kafka.input_topics
        for number, log in enumerate(broker.topics[topic].partitions)
        if log
    }
    worker.run(ends)
    return worker
