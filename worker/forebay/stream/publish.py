"""Publish records and learn what became of each: for the client and the tools, not for the worker's own outcomes.

Thread-safe, as the client underneath is. Callbacks run in whichever thread polls; what they raise is kept out of
the Kafka client, which would lose records over it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from forebay.errors import ForebayError
from forebay.records import Headers
from forebay.settings import Delivery, Kafka
from forebay.stream.client_config import producer_config
from forebay.stream.troubles import plain_cause

QUIET = logging.getLogger("forebay.kafka")
QUIET.addHandler(logging.NullHandler())


class DeliveryError(ForebayError):
    """The broker did not take a record. It may be published again."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Publication:
    """A record to publish. `partition` None leaves the choice to the key."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Headers = field(default_factory=list)
    partition: int | None = None
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a publication: its position, or why it has none."""

    topic: str
    partition: int
    offset: int
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


OnReceipt = Callable[[Receipt], None]


class Publisher:
    """An idempotent producer that gives up on a record after `give_up_after` seconds and says so."""

    def __init__(self, kafka: Kafka, *, linger_ms: float = 0, give_up_after: float = 30.0) -> None:
        self._config: dict[str, Any] = producer_config(kafka, Delivery()) | {
            "linger.ms": linger_ms,
            "message.timeout.ms": max(1, int(give_up_after * 1000)),
            "logger": QUIET,
            "error_cb": self._note,
        }
        self._give_up_after = give_up_after
        self._producer: Producer | None = None
        self.last_error: str | None = None

    def open(self) -> None:
        """Make the producer. It connects when the first record is published."""
        self._producer = Producer(self._config)

    def publish(self, publication: Publication, on_receipt: OnReceipt, room_within: float = 30.0) -> None:
        """Publish; `on_receipt` runs in a later `poll`. Waits up to `room_within` seconds while the queue is full.

        Raises DeliveryError if the record cannot even be queued, for example because it is too large.
        """
        options: dict[str, Any] = {"headers": publication.headers}
        if publication.partition is not None:
            options["partition"] = publication.partition
        if publication.timestamp_ms is not None:
            options["timestamp"] = publication.timestamp_ms
        deadline = time.monotonic() + room_within
        while True:
            try:
                self._live.produce(
                    publication.topic,
                    value=publication.value,
                    key=publication.key,
                    on_delivery=self._report(publication.topic, on_receipt),
                    **options,
                )
                return
            except BufferError as error:
                if time.monotonic() >= deadline:
                    raise DeliveryError(
                        f"the send queue stays full: {self.last_error or 'Kafka is too slow'}"
                    ) from error
                self.poll(0.05)
            except KafkaException as error:
                raise DeliveryError(_explain(publication, error.args[0])) from error

    def poll(self, wait: float = 0.0) -> None:
        """Run the callbacks of acknowledged records; waits at most `wait` seconds for one."""
        self._live.poll(wait)

    def flush(self, timeout: float = 30.0) -> int:
        """Wait until every record has its receipt; returns how many have none yet."""
        return int(self._live.flush(timeout))

    def close(self, timeout: float = 10.0) -> None:
        """Flush within `timeout` seconds and let go; what is unsent then never arrives."""
        if self._producer is not None:
            if self._producer.flush(timeout):
                self._producer.purge()
                self._producer.flush(1.0)
            self._producer = None

    @property
    def _live(self) -> Producer:
        if self._producer is None:
            raise DeliveryError("the publisher is not open")
        return self._producer

    def _note(self, error: KafkaError) -> None:
        self.last_error = error.str()

    def _report(self, topic: str, on_receipt: OnReceipt) -> Callable[[KafkaError | None, Any], None]:
        def report(error: KafkaError | None, message: Any) -> None:
            try:
                if error is not None:
                    on_receipt(Receipt(topic, -1, -1, self._why(error)))
                else:
                    on_receipt(Receipt(topic, message.partition(), message.offset()))
            except Exception:
                QUIET.exception("a receipt's callback failed")

        return report

    def _why(self, error: KafkaError) -> str:
        """Say why a record was not taken; of one that was given up the client only knows that its time was over."""
        if error.code() != KafkaError._MSG_TIMED_OUT:
            return error.str()
        cause = "" if self.last_error is None else f" ({plain_cause(self.last_error)})"
        return f"no broker took it within {self._give_up_after:g} s{cause}"


def _explain(publication: Publication, error: KafkaError) -> str:
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        size = len(publication.value or b"")
        return f"the record of {size:,} bytes is too large to send; raise message.max.bytes in kafka.client"
    if error.code() == KafkaError._UNKNOWN_PARTITION:
        return f"{publication.topic} has no partition {publication.partition}"
    return f"cannot publish to {publication.topic}: {error.str()}"
