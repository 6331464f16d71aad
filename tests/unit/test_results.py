"""Outcomes: results, error results and dead letters, as their readers see them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from forebay.records import RETRIABLE, Code, Encoding, Failure, Headers, Output, Reply, TensorShape
from forebay.stream.codec import Refusal
from forebay.stream.results import Encoder
from forebay.wire import InferenceError, parse_outcome, parse_result
from tests.unit.builders import record, request, signature

ENCODER = Encoder([signature(version="3")], "results", "my-group")
ECHO: Headers = [("kafka_correlationId", b"\x00c"), ("traceparent", None)]


def outputs(rows: int) -> list[Output]:
    return [Output((2,), np.arange(2 * rows, dtype="<f4").tobytes())]


def refusal(code: Code = Code.INVALID_PAYLOAD, message: str = "why", **options: Any) -> Refusal:
    one = record(b"value", [("mine", b"1")], key=b"key", partition=2, offset=77, timestamp_ms=1234)
    return Refusal(one, "the-id", "model", Failure(code, message), 1.0, **options)


def test_every_request_of_a_batch_gets_its_rows_its_id_and_its_source() -> None:
    requests = [request("a"), request("b", rows=3, encoding=Encoding.JSON), request("c", rows=2)]
    made = ENCODER.results(requests, outputs(6), 6)
    assert [one.id for one in made] == ["a", "b", "c"]
    start = 0
    for one, asked in zip(made, requests, strict=True):
        found = parse_result(one.value, one.headers)
        assert found.id == asked.id
        wanted = np.arange(2 * start, 2 * (start + asked.rows)).reshape(asked.rows, 2)
        assert np.array_equal(found["y"], wanted)
        assert found.source == asked.record.source
        assert found.batch_size == 6
        assert (one.topic, one.partition, one.failure) == ("results", None, None)
        assert one.record is asked.record
        start += asked.rows


def test_echoed_headers_come_back_unchanged_on_results_and_errors() -> None:
    asked = request(echo=list(ECHO))
    for one in (*ENCODER.results([asked], outputs(1), 1), ENCODER.error(asked, Failure(Code.MODEL_ERROR, "x"))):
        assert [pair for pair in one.headers if pair in ECHO] == ECHO
    assert asked.echo == ECHO


def test_a_result_goes_where_its_request_asked_for() -> None:
    asked = request()
    asked.reply = Reply("replies", 4)
    (one,) = ENCODER.results([asked], outputs(1), 1)
    assert (one.topic, one.partition) == ("replies", 4)
    error = ENCODER.error(asked, Failure(Code.MODEL_ERROR, "x"))
    assert (error.topic, error.partition) == ("replies", 4)


@pytest.mark.parametrize("code", list(Code))
def test_an_error_result_has_a_sentence_a_code_and_whether_to_try_again(code: Code) -> None:
    one = ENCODER.error(request("a", encoding=Encoding.BINARY), Failure(code, "why"), 8)
    expected = {"id": "a", "error": "why", "code": code.value, "retriable": code in RETRIABLE}
    assert json.loads(one.value) == expected
    found = dict(one.headers)
    source = found.pop("source")
    assert source == one.record.source.encode()
    assert found == {
        "status": b"error",
        "error-code": code.value.encode(),
        "model": b"model",
        "model-version": b"3",
        "batch-size": b"8",
        "content-type": b"application/json",
    }
    assert one.failure == Failure(code, "why")
    parsed = parse_outcome(one.value, one.headers)
    assert isinstance(parsed, InferenceError)
    assert (parsed.code, parsed.message, parsed.retriable) == (code.value, "why", code in RETRIABLE)


def test_a_refusal_becomes_an_error_result_too() -> None:
    one = ENCODER.error(refusal(reply=Reply("replies", None), echo=ECHO), Failure(Code.INVALID_PAYLOAD, "why"))
    assert (one.id, one.topic) == ("the-id", "replies")
    assert dict(one.headers)["source"] == b"requests/2/77"
    assert [pair for pair in one.headers if pair in ECHO] == ECHO


def test_an_error_of_a_model_that_is_not_served_has_no_version() -> None:
    unknown = refusal()
    unknown.model = "nobody"
    headers = dict(ENCODER.error(unknown, unknown.failure).headers)
    assert headers["model"] == b"nobody"
    assert "model-version" not in headers


def test_an_endless_message_is_cut() -> None:
    one = ENCODER.error(request(), Failure(Code.MODEL_ERROR, "x" * 1_000_000))
    assert len(one.value) < 5_000
    assert len(dict(ENCODER.dead_letter(one) or [])["kafka_dlt-exception-message"] or b"") < 5_000


def test_a_row_that_cannot_be_encoded_is_an_error_and_its_neighbours_are_results() -> None:
    encoder = Encoder([signature(outputs=[TensorShape("t", "BYTES", (-1,))])], "results", "g")
    requests = [request(name, encoding=Encoding.JSON) for name in "abc"]
    made = encoder.results(requests, [Output((), [b"fine", b"\xff", b"also"])], 3)
    assert [one.failure and one.failure.code for one in made] == [None, Code.UNSUPPORTED_TYPE, None]
    assert parse_result(made[2].value, made[2].headers)["t"] == [b"also"]


# ---------------------------------------------------------------------- dead letters


def test_a_dead_letter_has_the_headers_that_spring_writes() -> None:
    one = refusal(Code.INVALID_TENSOR, "it is crooked")
    headers = ENCODER.dead_letter(ENCODER.error(one, one.failure))
    assert headers == [
        ("mine", b"1"),
        ("kafka_dlt-original-topic", b"requests"),
        ("kafka_dlt-original-partition", b"\0\0\0\2"),
        ("kafka_dlt-original-offset", b"\0\0\0\0\0\0\0\x4d"),
        ("kafka_dlt-original-timestamp", b"\0\0\0\0\0\0\x04\xd2"),
        ("kafka_dlt-original-consumer-group", b"my-group"),
        ("kafka_dlt-exception-fqcn", b"forebay.invalid_tensor"),
        ("kafka_dlt-exception-message", b"it is crooked"),
        ("forebay-error-code", b"invalid_tensor"),
        ("forebay-attempts", b"1"),
    ]
    assert one.record.headers == [("mine", b"1")]


def test_a_dead_letter_counts_the_attempts() -> None:
    asked = request()
    asked.attempts = 3
    headers = ENCODER.dead_letter(ENCODER.error(asked, Failure(Code.POISONED, "x")))
    assert dict(headers or [])["forebay-attempts"] == b"3"


def test_a_request_that_ran_once_had_one_attempt() -> None:
    headers = ENCODER.dead_letter(ENCODER.error(request(), Failure(Code.MODEL_ERROR, "x")))
    assert dict(headers or [])["forebay-attempts"] == b"1"


def test_a_record_without_a_timestamp_has_a_dead_letter_all_the_same() -> None:
    one = refusal()
    one.record.timestamp_ms = -1
    assert ENCODER.dead_letter(ENCODER.error(one, one.failure))


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.DEADLINE_EXCEEDED])
def test_every_error_has_a_dead_letter(code: Code) -> None:
    assert ENCODER.dead_letter(ENCODER.error(request(), Failure(code, "x"))) is not None


def test_results_and_passed_deadlines_have_no_dead_letter() -> None:
    (result,) = ENCODER.results([request()], outputs(1), 1)
    assert ENCODER.dead_letter(result) is None
    assert ENCODER.dead_letter(ENCODER.error(request(), Failure(Code.DEADLINE_EXCEEDED, "x"))) is None


def test_a_result_that_its_topic_does_not_take_becomes_an_error_in_the_same_place() -> None:
    asked = request("a", echo=list(ECHO))
    asked.reply = Reply("replies", 1)
    (result,) = ENCODER.results([asked], outputs(1), 1)
    one = ENCODER.too_large(result, "too much")
    assert one.failure == Failure(Code.RESULT_TOO_LARGE, "too much")
    assert (one.id, one.topic, one.partition, one.record) == ("a", "replies", 1, asked.record)
    assert [pair for pair in one.headers if pair in ECHO] == ECHO
