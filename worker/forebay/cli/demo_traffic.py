"""The demo's requests and results: publishes samples in the binary encoding and follows the output topic.

One thread does both. Latency is from publishing a request to seeing its result, by this process's clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from forebay.calls import InferenceTimeoutError
from forebay.cli.demo_examples import Reader, Sample
from forebay.cli.demo_report import Arrival
from forebay.records import Record
from forebay.settings import Kafka
from forebay.stream.publish import DeliveryError, Publication, Publisher, Receipt
from forebay.stream.tail import Tail
from forebay.wire import InferenceError, build_request, parse_outcome
from forebay.wording import counted

PATIENCE_SECONDS = 60.0
WINDOW = 256
"""How many requests are under way at once: more than an example has, so that only a large --requests meets it."""

LATE_SECONDS = 0.3


class Traffic:
    """A producer and a reader of results. `insist_worker_runs` raises if there is nobody to wait for."""

    def __init__(self, kafka: Kafka, read: Reader, insist_worker_runs: Callable[[], None]) -> None:
        self._kafka = kafka
        self._read = read
        self._insist_worker_runs = insist_worker_runs
        self._publisher = Publisher(kafka)
        self._tail = Tail(kafka, [kafka.output_topic])
        self._waiting: dict[str, tuple[Sample, float]] = {}
        self._sent = 0
        self._duplicates = 0
        self._refused: str | None = None

    def __enter__(self) -> Self:
        self._tail.open()
        self._publisher.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.close(timeout=1.0)
        self._tail.close()

    def ask(self, samples: Sequence[Sample], *, one_by_one: bool) -> Iterator[Arrival]:
        """Publish the samples, each after the last one's result or all at once, and yield what arrives as it does.

        Raises ForebayError if nothing arrives for a minute.
        """
        left = deque(samples)
        heard = time.monotonic()
        while left or self._waiting:
            while left and len(self._waiting) < (1 if one_by_one else WINDOW):
                self._publish(left.popleft())
            self._publisher.poll()
            records = self._tail.read(wait=0.05)
            now = time.monotonic()
            for record in records:
                arrival = self._receive(record, now, one_by_one)
                if arrival is not None:
                    yield arrival
            if records:
                heard = now
                continue
            self._insist_worker_runs()
            if self._refused is not None:
                raise DeliveryError(f"the broker did not take a request: {self._refused}")
            if now - heard > PATIENCE_SECONDS:
                count = counted(len(self._waiting), "request")
                raise InferenceTimeoutError(f"{count} got no result: {', '.join(self._waiting)}"[:500])

    def count_duplicates(self) -> int:
        """Listen a moment longer and return how many requests got more than one outcome."""
        deadline = time.monotonic() + LATE_SECONDS
        while time.monotonic() < deadline:
            self._duplicates += len(self._tail.read(wait=0.05))
        return self._duplicates

    def _publish(self, sample: Sample) -> None:
        self._sent += 1
        id = f"demo-{self._sent:04d}"
        value, headers = build_request(sample.inputs, id=id)
        self._waiting[id] = (sample, time.monotonic())
        topic = self._kafka.input_topics[0]
        self._publisher.publish(Publication(topic, value, id.encode(), headers), self._acknowledge)

    def _acknowledge(self, receipt: Receipt) -> None:
        self._refused = self._refused or receipt.error

    def _receive(self, record: Record, now: float, alone: bool) -> Arrival | None:
        waited = self._waiting.pop((record.key or b"").decode("utf-8", "replace"), None)
        if waited is None:
            self._duplicates += 1
            return None
        sample, sent_at = waited
        outcome = parse_outcome(record.value or b"", record.headers)
        if isinstance(outcome, InferenceError):
            return Arrival(sample, alone, sent_at, now, None, None, error=f"{outcome.code}: {outcome.message}")
        return Arrival(sample, alone, sent_at, now, outcome.batch_size, self._read(sample, outcome.outputs))
