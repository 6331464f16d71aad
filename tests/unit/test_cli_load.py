"""The load of `forebay bench`: what it counts, and what it leaves out."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future

from forebay.cli.load import Load, Measured, Shape
from forebay.errors import ForebayError
from forebay.records import Code, Headers, Record
from forebay.stream.exchange import Sent
from forebay.wire import build_error


class Answering:
    """An exchange that answers each request at once, from a thread of its own; every fifth one is never answered."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.most = 0
        self.keys: list[bytes] = []
        self._deaf = deaf
        self._under_way = 0
        self._lock = threading.Lock()

    def send(self, value: bytes, key: bytes, headers: Headers) -> Sent:
        sent = Sent(key, Future(), time.monotonic(), 0)
        with self._lock:
            self.keys.append(key)
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        if not (self._deaf and len(self.keys) % 5 == 0):
            threading.Thread(target=self._answer, args=(sent,)).start()
        return sent

    def _answer(self, sent: Sent) -> None:
        with self._lock:
            self._under_way -= 1
        headers: Headers = [("status", b"ok"), ("batch-size", b"4")]
        sent.future.set_result(Record("out", 0, 0, sent.correlation, b"", headers, 0))


def test_a_closed_loop_keeps_to_its_window_and_gives_every_request_an_id() -> None:
    exchange = Answering()
    measured = Load(exchange, [(b"a", []), (b"b", [])]).run(Shape(0.2, 0.0, None, 3, 5.0))
    assert exchange.most <= 3
    assert len(set(exchange.keys)) == len(exchange.keys) == measured.sent
    assert measured.statuses == Counter(ok=len(measured.latencies))
    assert measured.unanswered == 0


def test_an_open_loop_sends_what_the_rate_asks_for() -> None:
    measured = Load(Answering(), [(b"a", [])]).run(Shape(0.2, 0.1, 95.0, 1, 5.0))
    assert measured.sent == 29
    assert len(measured.latencies) == 19


def test_requests_without_an_answer_are_told() -> None:
    measured = Load(Answering(deaf=True), [(b"a", [])]).run(Shape(0.1, 0.0, 95.0, 1, 0.5))
    assert measured.unanswered == 2
    assert len(measured.latencies) == 8


def test_errors_count_by_their_code() -> None:
    load = Load(Answering(), [(b"a", [])])
    future: Future[Record] = Future()
    future.set_exception(ForebayError("gone"))
    load._receive(0, time.monotonic(), future)
    load._count(Record("out", 0, 0, b"", b"", [("error-code", b"model_error")], 0), 0.1, 1.0)
    assert load._measured.statuses == Counter(ForebayError=1, model_error=1)


def test_the_mean_batch_size_is_over_batches_not_over_requests() -> None:
    measured = Measured(latencies=[0.001] * 12, batches=Counter({1: 2, 10: 10}), seconds=2.0)
    summary = measured.summary()
    assert summary["batch_size"] == 4.0
    assert summary["throughput"] == 6.0
    assert summary["latency_ms"]["p99"] == 1.0
    assert Measured().summary()["latency_ms"] == {"p50": None, "p90": None, "p99": None, "max": None}


def test_progress_names_the_warm_up_and_counts_in_it() -> None:
    """During the warm-up it stood at `answered 0/?`."""
    load = Load(Answering(), [(b"a", [])])
    load._measure_from = 10.0
    told: list[tuple[int, str | None]] = []

    def advance(done: int, word: str | None = None) -> None:
        told.append((done, word))

    future: Future[Record] = Future()
    future.set_result(Record("out", 0, 0, b"", b"", [], 0))
    load._receive(0, 9.0, future)
    load._tell(advance, 9.5)
    load._receive(1, 11.0, future)
    load._tell(advance, 11.0)
    assert told == [(1, "warming up, not measured; answered"), (1, "measuring; answered")]
    assert len(load._measured.latencies) == 1


def test_progress_is_told_until_the_last_answer() -> None:
    told: list[str] = []
    Load(Answering(), [(b"a", [])]).run(Shape(0.05, 0.0, None, 1, 5.0), lambda done, word=None: told.append(word or ""))
    assert told[0] == "measuring; answered"
    assert told[-1].startswith("waiting for the last")


def test_the_first_error_is_kept_in_its_words() -> None:
    """A bench whose every request failed told the code, and nobody why."""
    value, headers = build_error("b1", Code.INVALID_TENSOR, "input x: wrong")
    load = Load(Answering(), [(b"a", [])])
    for record in (Record("out", 0, 0, b"", value, headers, 0), Record("out", 0, 1, b"", b"?", headers, 0)):
        load._count(record, 0.1, 1.0)
    assert load._measured.summary()["first_error"] == "invalid_tensor: input x: wrong (request b1)"
    assert Measured().summary()["first_error"] is None
