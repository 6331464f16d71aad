"""Load for `forebay bench`: sends requests at a rate or in a closed loop and measures what comes back.

In the open loop a latency counts from when the request should have left, so that a slow worker cannot slow the
measurement down and look fast.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.calls import InferenceTimeoutError
from forebay.cli.progress import Advance
from forebay.records import Record
from forebay.stream.exchange import Exchange, Sent
from forebay.wire import WireError, parse_outcome, text_header
from forebay_schemas import headers as names

TELL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Shape:
    """The load: `rate` requests per second, or `window` requests under way at once. Times in seconds."""

    seconds: float
    warm_up: float
    rate: float | None
    window: int
    timeout: float


@dataclass(slots=True)
class Measured:
    """What came back after the warm-up. `latencies` are seconds; `batches` counts requests by their batch's size."""

    latencies: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    batches: Counter[int] = field(default_factory=Counter)
    sent: int = 0
    unanswered: int = 0
    first_error: str | None = None
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Give throughput per second, latency in milliseconds, and batch sizes."""
        ordered = sorted(self.latencies)
        batched = sum(self.batches.values())
        # Every request of a batch reports its size: batches of size n are seen n times, so weigh them back.
        batches = sum(count / size for size, count in self.batches.items())
        return {
            "requests": len(ordered),
            "seconds": round(self.seconds, 3),
            "throughput": round(len(ordered) / self.seconds, 1) if self.seconds else 0.0,
            "latency_ms": {f"p{q}": _quantile(ordered, q / 100) for q in (50, 90, 99)}
            | {"max": round(ordered[-1] * 1000, 2) if ordered else None},
            "batch_size": round(batched / batches, 2) if batches else None,
            "batch_sizes": {str(size): count for size, count in sorted(self.batches.items())},
            "statuses": dict(self.statuses),
            "unanswered": self.unanswered,
            "first_error": self.first_error,
        }


class Load:
    """One run. The calling thread sends; the exchange's thread receives."""

    def __init__(self, exchange: Exchange, requests: Sequence[tuple[bytes, list[tuple[str, bytes | None]]]]) -> None:
        self._exchange = exchange
        self._requests = requests
        self._measured = Measured()
        self._lock = threading.Lock()
        self._room = threading.Semaphore(0)
        self._under_way: set[int] = set()
        self._measure_from = 0.0
        self._tell_from = 0.0
        self._warmed_up = 0
        self._last = 0.0

    def run(self, shape: Shape, advance: Advance | None = None) -> Measured:
        """Send for warm-up and duration, then wait for what is under way; `advance` is told of it now and then."""
        self._room = threading.Semaphore(shape.window)
        start = time.monotonic()
        self._measure_from = start + shape.warm_up
        end = self._measure_from + shape.seconds
        number = 0
        while (due := self._due(start, number, shape)) < end:
            self._wait_until(due, shape)
            self._send(number, due if shape.rate else time.monotonic(), shape)
            number += 1
            if advance is not None and (now := time.monotonic()) >= self._tell_from:
                self._tell_from = now + TELL_SECONDS
                self._tell(advance, now)
        if advance is not None:
            advance(len(self._measured.latencies), f"waiting for the last {len(self._under_way):,}; answered")
        self._drain(shape.timeout)
        self._measured.seconds = max(self._last - self._measure_from, 0.0)
        return self._measured

    def _tell(self, advance: Advance, now: float) -> None:
        if now < self._measure_from:
            advance(self._warmed_up, "warming up, not measured; answered")
        else:
            advance(len(self._measured.latencies), "measuring; answered")

    def _due(self, start: float, number: int, shape: Shape) -> float:
        return start + number / shape.rate if shape.rate else time.monotonic()

    def _wait_until(self, due: float, shape: Shape) -> None:
        if shape.rate:
            left = due - time.monotonic()
            if left > 0:
                time.sleep(left)
        elif not self._room.acquire(timeout=shape.timeout):
            raise InferenceTimeoutError(
                f"no result came within {shape.timeout:g} s: is a worker running that reads this topic? (forebay run)"
            )

    def _send(self, number: int, due: float, shape: Shape) -> None:
        value, headers = self._requests[number % len(self._requests)]
        with self._lock:
            self._under_way.add(number)
            self._measured.sent += 1
        sent: Sent = self._exchange.send(value, b"bench-%d" % number, headers)
        sent.future.add_done_callback(lambda future: self._receive(number, due, future))

    def _receive(self, number: int, due: float, future: Any) -> None:
        now = time.monotonic()
        self._room.release()
        with self._lock:
            self._under_way.discard(number)
            if due < self._measure_from:
                self._warmed_up += 1
                return
            error = future.exception()
            if error is not None:
                self._measured.statuses[type(error).__name__] += 1
                return
            self._count(future.result(), now - due, now)

    def _count(self, record: Record, latency: float, now: float) -> None:
        code = text_header(record.headers, names.ERROR_CODE)
        size = text_header(record.headers, names.BATCH_SIZE)
        self._measured.statuses[code or names.OK] += 1
        if code is not None and self._measured.first_error is None:
            with contextlib.suppress(WireError):
                self._measured.first_error = str(parse_outcome(record.value or b"", record.headers))
        self._measured.latencies.append(latency)
        self._last = now
        if size and size.isdigit() and int(size):
            self._measured.batches[int(size)] += 1

    def _drain(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._under_way and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._lock:
            self._measured.unanswered = len(self._under_way)


def _quantile(ordered: list[float], q: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1000, 2)
