"""Requests out, outcomes back: sends records and matches what returns to them by correlation id.

One daemon thread of its own owns the reading side and runs every callback; `send` may be called from any thread.
Knows records and headers, and nothing about tensors. Not to be carried across a fork.
"""

from __future__ import annotations

import struct
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass

from forebay.errors import ForebayError, KafkaFatalError
from forebay.records import Headers, Record, Reply
from forebay.settings import Kafka
from forebay.stream.publish import DeliveryError, Publication, Publisher, Receipt
from forebay.stream.tail import Followed, Tail
from forebay.stream.troubles import plain_cause
from forebay.wording import counted
from forebay_schemas.headers import CORRELATION_ID, REPLY_PARTITION, REPLY_TOPIC

_UNWANTED_SECONDS = 1.0


class ClosedError(ForebayError):
    """The client was closed before the result came; the request may still be answered, unread."""


@dataclass(slots=True, eq=False)
class Sent:
    """A request under way. `future` gets the outcome's record, or the error that kept it from coming."""

    correlation: bytes
    future: Future[Record]
    sent_at: float
    others_before: int
    receipt: Receipt | None = None
    acknowledged_after: float = 0.0


@dataclass(slots=True)
class _Counts:
    outcomes: int = 0
    unmatched: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """Where requests go, and where results come: the output topic, or a reply topic of the client's own."""

    input_topic: str
    output_topic: str
    reply: Reply | None = None

    @property
    def headers(self) -> Headers:
        """What a request says about its reply."""
        if self.reply is None:
            return []
        headers: Headers = [(REPLY_TOPIC, self.reply.topic.encode())]
        if self.reply.partition is not None:
            headers.append((REPLY_PARTITION, struct.pack(">i", self.reply.partition)))
        return headers

    @property
    def followed(self) -> list[Followed]:
        """The topics to read. A refused reply is answered on the output topic, so that is followed as well at first."""
        if self.reply is None:
            return [Followed(self.output_topic)]
        only = None if self.reply.partition is None else [self.reply.partition]
        return [Followed(self.reply.topic, only), Followed(self.output_topic, optional=True)]


class Exchange:
    """The connection of a client."""

    def __init__(self, kafka: Kafka, route: Route, *, linger_ms: float = 0.0) -> None:
        self._route = route
        self._tail = Tail(kafka, route.followed, "end")
        self._publisher = Publisher(kafka, linger_ms=linger_ms)
        self._waiting: dict[bytes, Sent] = {}
        self._lock = threading.Lock()
        self._counts = _Counts()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._broken: ForebayError | None = None
        self._watches_output = route.reply is not None

    def open(self, timeout: float) -> None:
        """Connect; outcomes of requests sent from now on will be seen.

        The producer first: it takes up to half a second to get its id, and does so while the tail connects. Raises
        KafkaUnavailableError or ConfigError, as `Tail.open` does.
        """
        self._publisher.open()
        try:
            self._tail.open(timeout)
            self._tail.count_partitions(self._route.input_topic, timeout)
        except BaseException:
            self._tail.close()
            self._publisher.close(0.0)
            raise
        self._thread = threading.Thread(target=self._receive, name="forebay-client", daemon=True)
        self._thread.start()

    def send(self, value: bytes, key: bytes, headers: Headers, room_within: float = 30.0) -> Sent:
        """Publish a request.

        Raises DeliveryError if it cannot even be queued, ClosedError after `close`. Waits up to `room_within` seconds
        while the send queue is full.
        """
        correlation = next((v for k, v in headers if k == CORRELATION_ID and v), None)
        if correlation is None:
            correlation = uuid.uuid4().bytes
            headers = [*headers, (CORRELATION_ID, correlation)]
        sent = Sent(correlation, Future(), time.monotonic(), self._counts.unmatched)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            if self._stopping.is_set():
                raise ClosedError("the client is closed")
            if correlation in self._waiting:
                raise DeliveryError(f"another request with this {CORRELATION_ID} is under way")
            self._waiting[correlation] = sent
        try:
            publication = Publication(self._route.input_topic, value, key, headers + self._route.headers)
            self._publisher.publish(publication, lambda receipt: self._acknowledge(sent, receipt), room_within)
        except BaseException:
            self.abandon(sent)
            raise
        return sent

    def abandon(self, sent: Sent) -> bool:
        """Stop waiting for a request; returns whether it was still waiting."""
        with self._lock:
            return self._waiting.pop(sent.correlation, None) is not None

    def explain(self, sent: Sent) -> str:
        """Say how far a request came that has no outcome yet."""
        if sent.receipt is None:
            trouble = self._publisher.last_error or self._tail.last_error
            why = plain_cause(trouble) if trouble else "Kafka is slow or gone"
            return f"the broker has not acknowledged the request: {why}"
        where = self._route.reply.topic if self._route.reply else self._route.output_topic
        others = self._counts.unmatched - sent.others_before
        told = f"it is {sent.receipt}, acknowledged after {sent.acknowledged_after * 1000:.0f} ms; "
        if others:
            foreign = counted(others, "outcome")
            return f"{told}{foreign} of other requests arrived on {where} meanwhile: the worker is behind"
        return told + f"nothing arrived on {where} meanwhile: is a worker running that reads {sent.receipt.topic}?"

    def close(self, timeout: float = 10.0) -> None:
        """Flush, stop the thread and fail what still waits. May be called twice.

        Where nobody waits for anything any more, what is still unsent is worth a second and no more.
        """
        self._stopping.set()
        if self._thread is not None:
            self._publisher.close(timeout if self._waiting else min(timeout, _UNWANTED_SECONDS))
            self._thread.join(timeout)
            self._thread = None
        self._fail_all(ClosedError("the client was closed before the result came"))

    def _receive(self) -> None:
        try:
            while not self._stopping.is_set():
                for record in self._tail.read(wait=0.05):
                    self._match(record)
                self._poll_publisher()
        except ForebayError as error:
            self._break(error)
        except Exception as error:  # the top of the thread: whatever it is, no caller may wait for ever
            self._break(KafkaFatalError(f"the client's reader failed: {error!r}"))
        finally:
            self._tail.close()

    def _poll_publisher(self) -> None:
        try:
            self._publisher.poll()
        except DeliveryError:
            if not self._stopping.is_set():
                raise

    def _match(self, record: Record) -> None:
        correlation = next((v for k, v in record.headers if k == CORRELATION_ID), None)
        with self._lock:
            sent = self._waiting.pop(correlation, None) if correlation else None
        if sent is None:
            self._counts.unmatched += 1
            return
        self._counts.outcomes += 1
        if self._watches_output and self._route.reply and record.topic == self._route.reply.topic:
            self._watches_output = False
            self._tail.forget(self._route.output_topic)
        _settle(sent.future, record)

    def _acknowledge(self, sent: Sent, receipt: Receipt) -> None:
        if receipt.error is None:
            sent.acknowledged_after = time.monotonic() - sent.sent_at
            sent.receipt = receipt
            return
        if self.abandon(sent):
            _settle(sent.future, DeliveryError(f"the broker did not take the request: {receipt.error}"))

    def _break(self, error: ForebayError) -> None:
        with self._lock:
            self._broken = error
        self._fail_all(error)

    def _fail_all(self, error: ForebayError) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for sent in waiting:
            _settle(sent.future, error)


def _settle(future: Future[Record], outcome: Record | ForebayError) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, ForebayError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
