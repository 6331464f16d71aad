"""The client without Kafka: where requests and replies go, and how waiting ends."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from forebay import calls
from forebay.calls import Call
from forebay.client import AsyncClient, Client, ClosedError, DeliveryError, InferenceTimeoutError, WireError
from forebay.errors import ForebayError, UsageError
from forebay.records import Record, Reply
from forebay.settings import Kafka
from forebay.stream.exchange import Exchange, Route, Sent
from forebay.stream.publish import Receipt
from forebay.stream.tail import Followed

ROUTE = Route("in", "out")


def sent(correlation: bytes = b"c") -> Sent:
    return Sent(correlation, Future(), time.monotonic(), 0)


def exchange_with(one: Sent, route: Route = ROUTE) -> Exchange:
    exchange = Exchange(Kafka(), route)
    exchange._waiting[one.correlation] = one
    return exchange


def late(one: Sent) -> Call:
    return Call("id", one, 1.0, time.monotonic() - 100)


def outcome(correlation: bytes | None, topic: str = "out") -> Record:
    headers = [] if correlation is None else [("kafka_correlationId", correlation)]
    return Record(topic, 0, 0, b"id", b"{}", headers, 0)


def test_a_client_without_a_reply_topic_follows_the_output_topic() -> None:
    assert ROUTE.headers == []
    assert ROUTE.followed == [Followed("out")]


def test_a_reply_topic_is_named_in_the_request_and_a_refusal_is_looked_for_on_the_output_topic() -> None:
    route = Route("in", "out", Reply("mine", 258))
    assert route.headers == [("kafka_replyTopic", b"mine"), ("kafka_replyPartition", b"\x00\x00\x01\x02")]
    assert route.followed == [Followed("mine", [258]), Followed("out", optional=True)]
    assert Route("in", "out", Reply("mine", None)).headers == [("kafka_replyTopic", b"mine")]


def test_an_outcome_goes_to_the_request_with_its_correlation_id_and_to_no_other() -> None:
    mine = sent()
    exchange = exchange_with(mine)
    for foreign in (outcome(b"other"), outcome(None)):
        exchange._match(foreign)
    assert not mine.future.done()
    first = outcome(b"c")
    exchange._match(first)
    exchange._match(outcome(b"c"))
    assert mine.future.result(0) is first


def test_a_record_that_the_broker_refuses_ends_the_wait() -> None:
    mine = sent()
    exchange_with(mine)._acknowledge(mine, Receipt("in", -1, -1, "Broker: Message size too large"))
    with pytest.raises(DeliveryError, match="did not take the request: Broker: Message size too large"):
        mine.future.result(0)


def test_a_late_delivery_error_does_not_overwrite_a_result() -> None:
    mine = sent()
    exchange = exchange_with(mine)
    exchange._match(outcome(b"c"))
    exchange._acknowledge(mine, Receipt("in", -1, -1, "timed out"))
    assert mine.future.exception(0) is None


def test_a_reader_that_breaks_fails_what_waits_and_what_comes() -> None:
    mine = sent()
    exchange = exchange_with(mine)
    exchange._break(ForebayError("the topic is gone"))
    with pytest.raises(ForebayError, match="the topic is gone"):
        mine.future.result(0)
    with pytest.raises(ForebayError, match="the topic is gone"):
        exchange.send(b"", b"", [])


def test_the_story_of_a_late_request_says_how_far_it_came() -> None:
    mine = sent()
    exchange = exchange_with(mine)
    assert "the broker has not acknowledged the request: Kafka is slow or gone" in exchange.explain(mine)
    exchange._acknowledge(mine, Receipt("in", 1, 7))
    assert re.search(r"it is in/1/7, acknowledged after \d+ ms; nothing arrived on out", exchange.explain(mine))
    exchange._match(outcome(b"other"))
    assert "1 outcome of other requests arrived on out meanwhile" in exchange.explain(mine)


def test_a_result_that_is_there_is_taken_even_if_its_time_is_over() -> None:
    mine = sent()
    mine.future.set_result(outcome(b"c"))
    assert Client(Kafka())._wait(late(mine)).key == b"id"
    assert asyncio.run(AsyncClient(Kafka())._wait(late(mine))).key == b"id"


@pytest.mark.parametrize(("connecting", "told"), [(3.0, b"2000"), (0.05, b"5000")])
def test_connecting_is_within_a_calls_timeout_and_the_worker_is_told_what_is_left(
    monkeypatch: pytest.MonkeyPatch, connecting: float, told: bytes
) -> None:
    clock = [1000.0]
    sent_headers: list[tuple[str, bytes | None]] = []

    class Slow:
        def __init__(self, *_: object) -> None: ...

        def open(self, seconds: float) -> None:
            assert seconds == 5
            clock[0] += connecting

        def send(self, value: bytes, key: bytes, headers: list[tuple[str, bytes | None]], within: float) -> Sent:
            sent_headers.extend(headers)
            assert within == pytest.approx(5 - connecting)
            return sent()

    monkeypatch.setattr(calls, "Exchange", Slow)
    monkeypatch.setattr(calls.time, "monotonic", lambda: clock[0])
    call = Client(Kafka(), connect_timeout=60)._calls.send({"x": [1]}, 5, {})
    assert call.remaining == pytest.approx(5 - connecting)
    assert dict(sent_headers)["timeout-ms"] == told


def test_a_timeout_is_a_timeout_error_of_python_too() -> None:
    mine = sent()
    with pytest.raises(TimeoutError) as caught:
        Client(Kafka())._wait(late(mine))
    assert isinstance(caught.value, InferenceTimeoutError)
    assert isinstance(caught.value, ForebayError)


def test_a_closed_client_says_so() -> None:
    client = Client(Kafka())
    client.close()
    client.close()
    with pytest.raises(ClosedError):
        client.infer({"x": [1]})


def test_a_client_takes_its_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KAFKA__BOOTSTRAP_SERVERS", "from-environment:1")
    monkeypatch.setenv("FOREBAY_KAFKA__OUTPUT_TOPIC", "elsewhere")
    assert Client()._calls._kafka.bootstrap_servers == "from-environment:1"
    named = Client("named:2")._calls._kafka
    assert (named.bootstrap_servers, named.output_topic) == ("named:2", "elsewhere")


@pytest.mark.parametrize(
    ("inputs", "options", "sentence"),
    [
        ([1.0], {}, "inputs must be a mapping of tensor names to arrays, not list"),
        (None, {}, "not NoneType"),
        ({1: [1]}, {}, "a tensor's name is a string, not 1"),
        ({"x": {"a": 1}}, {}, "x: a tensor is an array"),
        ({"x": [1]}, {"id": 5}, "a request id is a string, not int"),
        ({"x": [1]}, {"priorty": 1}, "no option priorty; did you mean priority?"),
        ({"x": [1]}, {"outputs": "y"}, "outputs is a list of names"),
    ],
)
def test_what_is_no_request_is_refused_in_one_sentence_before_anything_connects(
    inputs: Any, options: dict[str, Any], sentence: str
) -> None:
    """A list in place of the mapping ended in an AttributeError."""
    with pytest.raises(WireError, match=re.escape(sentence)):
        Client("127.0.0.1:1").infer(inputs, **options)


def test_map_refuses_what_is_neither_inputs_nor_a_pair() -> None:
    with pytest.raises(WireError, match="or a pair"):
        list(Client("127.0.0.1:1").map([[1.0]]))  # type: ignore[list-item]


def test_a_client_is_made_of_an_address_or_a_section_and_nothing_else() -> None:
    with pytest.raises(UsageError, match="not list"):
        Client(["127.0.0.1:1"])  # type: ignore[arg-type]


@pytest.mark.parametrize(("waits", "seconds"), [(True, 10.0), (False, 1.0)])
def test_closing_flushes_at_length_only_where_someone_waits(
    waits: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose only call had timed out took ten seconds to close while the broker was away."""
    mine = sent()
    exchange = exchange_with(mine)
    given: list[float] = []
    monkeypatch.setattr(exchange._publisher, "close", given.append)
    exchange._thread = threading.Thread()
    exchange._thread.start()
    if not waits:
        exchange.abandon(mine)
    exchange.close()
    assert given == [seconds]
    assert mine.future.done() is waits
