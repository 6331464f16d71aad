"""Seeded runs whose producers send requests again, under the same id: `delivery.deduplicate_ms` is on.

Like `simulation`, whose group, deaths and rebalances they have.
"""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

from tests.faults.history import History, Promise
from tests.faults.memory_group import PARTITIONS
from tests.faults.simulation import Run
from tests.kafka_probe import Send

RETRIES = 14


class RepeatingRun(Run):
    """A run in which many requests come two or three times, in their own partition, now or much later."""

    def __init__(self, seed: int, promise: Promise) -> None:
        super().__init__(seed, promise)
        self.unsent += [self._again(self.dice.choice(self.unsent)) for _ in range(RETRIES)]
        self.dice.shuffle(self.unsent)
        span = self.dice.choice((40, 400, 100_000))
        delivery = self.settings.delivery.model_copy(update={"deduplicate_ms": span})
        # A full queue is not polled for a while: an expelled member that learns nothing is told elsewhere.
        batch = self.settings.batch.model_copy(update={"max_queue_size": 4 * RETRIES})
        self.settings = self.settings.model_copy(update={"delivery": delivery, "batch": batch})
        self.promise = replace(promise, deduplicate_ms=span)

    def _again(self, send: Send) -> Send:
        """A retry has time again."""
        return replace(send, headers=[pair for pair in send.headers if pair[0] != "timeout-ms"])

    def _publish(self) -> None:
        for _ in range(min(self.dice.randrange(1, 9), len(self.unsent))):
            send = self.unsent.pop()
            place = crc32(dict(send.headers).get("x-request-id") or send.key or b"") % len(PARTITIONS)
            self.broker.append("requests", send.value, send.key, list(send.headers), place)

    def _history(self) -> History:
        found = super()._history()
        stamps = {(r.topic, r.partition, r.offset): r.timestamp_ms for r in self.broker.records("requests")}
        return replace(found, inputs=tuple(replace(one, timestamp_ms=stamps[one.position]) for one in found.inputs))
