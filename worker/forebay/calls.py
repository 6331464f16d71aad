"""The calls of a client: build a request, send it, say why a result is late. Shared by `Client` and `AsyncClient`.

Runs in the caller's thread; one exchange with its own thread stands behind it.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from forebay.errors import ForebayError, KafkaUnavailableError, UsageError
from forebay.records import Record, Reply
from forebay.settings import Kafka, load
from forebay.stream.exchange import ClosedError, Exchange, Route, Sent
from forebay.stream.troubles import unreachable
from forebay.wire import (
    InferenceError,
    Inputs,
    RequestOptions,
    Result,
    WireEncoding,
    WireError,
    build_request,
    parse_result,
)

Work = Inputs | tuple[str, Inputs]
"""An element of `map`: a request's inputs, or a pair of its id and its inputs."""

_CONNECTED_SECONDS = 0.1
"""Connecting that took less than this is not taken off what a request tells the worker."""


class InferenceTimeoutError(ForebayError, TimeoutError):
    """No result came in time. The message says how far the request got; it may still be answered, unread."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What holds for every request of a client; `Client` says what each means."""

    model: str | None = None
    timeout: float = 30.0
    encoding: WireEncoding = "binary"
    reply_to: Reply | str | None = None
    connect_timeout: float = 10.0


@dataclass(frozen=True, slots=True)
class Call:
    """A request under way: what to wait for, until when, and what to say if it does not come."""

    id: str
    sent: Sent
    timeout: float
    until: float

    @property
    def remaining(self) -> float:
        """Seconds left to wait; a result that is there already is taken even at zero."""
        return max(0.0, self.until - time.monotonic())


class Calls:
    """Opens the exchange at first use and makes calls on it. Thread-safe."""

    def __init__(self, kafka: Kafka | str | None, options: ClientOptions) -> None:
        if not (kafka is None or isinstance(kafka, Kafka | str)):
            kind = type(kafka).__name__
            raise UsageError(f"kafka is bootstrap servers such as 'localhost:9092', or settings.kafka, not {kind}")
        section = kafka if isinstance(kafka, Kafka) else load().kafka
        if isinstance(kafka, str):
            section = section.model_copy(update={"bootstrap_servers": kafka})
        reply = Reply(options.reply_to, None) if isinstance(options.reply_to, str) else options.reply_to
        self._kafka = section
        self._route = Route(section.input_topics[0], section.output_topic, reply)
        self._options = options
        self._exchange: Exchange | None = None
        self._lock = threading.Lock()
        self._closed = False

    def open(self, within: float | None = None) -> Exchange:
        """Connect, if that has not happened yet, `within` so many seconds where that is less than connect_timeout."""
        seconds = self._options.connect_timeout
        seconds = seconds if within is None else min(seconds, within)
        if not self._lock.acquire(timeout=max(0.0, seconds)):  # another thread is connecting, and has longer to do so
            raise KafkaUnavailableError(unreachable(self._kafka.bootstrap_servers, None))
        try:
            if self._closed:
                raise ClosedError("the client is closed")
            if self._exchange is None:
                exchange = Exchange(self._kafka, self._route)
                exchange.open(seconds)
                self._exchange = exchange
            return self._exchange
        finally:
            self._lock.release()

    def close(self) -> None:
        """Send what is queued, disconnect, fail what waits."""
        with self._lock:
            self._closed = True
            exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def send(self, inputs: Inputs, timeout: float | None, options: RequestOptions) -> Call:
        """Build and publish one request; `timeout` begins now, so that connecting, too, is within it."""
        seconds = self._options.timeout if timeout is None else timeout
        until = time.monotonic() + seconds
        told: RequestOptions = {"id": uuid.uuid4().hex, "timeout_ms": _milliseconds(seconds), **options}
        if self._options.model is not None:
            told.setdefault("model", self._options.model)
        value, headers = build_request(inputs, encoding=self._options.encoding, **told)
        exchange = self.open(seconds)
        left = max(0.0, until - time.monotonic())
        if left < seconds - _CONNECTED_SECONDS and "timeout_ms" not in options:
            told["timeout_ms"] = _milliseconds(left)
            value, headers = build_request(inputs, encoding=self._options.encoding, **told)
        return Call(told["id"], exchange.send(value, told["id"].encode(), headers, left), seconds, until)

    def send_work(self, work: Work, timeout: float | None, options: RequestOptions) -> Call:
        """Publish one element of `map`."""
        if isinstance(work, Mapping):
            return self.send(work, timeout, options)
        if not isinstance(work, tuple) or len(work) != 2:
            kind = type(work).__name__
            raise WireError(f"a request is a mapping of tensor names to arrays, or a pair (id, inputs), not {kind}")
        id, inputs = work
        return self.send(inputs, timeout, {**options, "id": id})

    def late(self, call: Call) -> InferenceTimeoutError:
        """Give up on a call and say how far it came."""
        exchange = self._exchange
        story = exchange.explain(call.sent) if exchange else "the client was closed"
        self.abandon(call)
        return InferenceTimeoutError(f"no result for request {call.id} within {call.timeout:g} s: {story}")

    def abandon(self, call: Call) -> None:
        """Stop waiting for a call."""
        if self._exchange is not None:
            self._exchange.abandon(call.sent)


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def read(record: Record) -> Result:
    """Read an outcome; raises InferenceError for an error result."""
    if record.value is None:
        raise WireError(f"{record.source} has no value")
    return parse_result(record.value, record.headers)


def read_either(record: Record) -> Result | InferenceError:
    """Read an outcome; gives an error result instead of raising it."""
    try:
        return read(record)
    except InferenceError as error:
        return error
