"""Requests, results and error results as record values and headers, and back."""

from __future__ import annotations

import json

import numpy as np
import pytest

from forebay.records import RETRIABLE, Code
from forebay.wire import (
    InferenceError,
    WireError,
    build_error,
    build_request,
    build_result,
    parse_outcome,
    parse_request,
    parse_result,
)
from forebay.wire.values import Result
from forebay_schemas import ErrorResult, InferenceRequest, InferenceResult, RequestHeaders, ResultHeaders


def test_a_binary_request_is_json_then_little_endian_tensors() -> None:
    value, headers = build_request({"x": np.array([[1, 2]], np.uint16), "t": [b"ab"]}, id="r1")
    length = int(dict(headers)["inference-header-content-length"])
    assert dict(headers)["content-type"] == b"application/octet-stream"
    assert value[length:] == b"\x01\x00\x02\x00" + b"\x02\x00\x00\x00ab"
    assert json.loads(value[:length]) == {
        "id": "r1",
        "inputs": [
            {"name": "x", "shape": [1, 2], "datatype": "UINT16", "parameters": {"binary_data_size": 4}},
            {"name": "t", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}},
        ],
    }


def test_a_json_request_is_an_open_inference_protocol_document() -> None:
    value, headers = build_request({"x": [[1.5, 2]]}, encoding="json", id="r1", outputs=["y"], parameters={"p": True})
    assert headers == [("content-type", b"application/json")]
    assert json.loads(value) == {
        "id": "r1",
        "parameters": {"p": True},
        "outputs": [{"name": "y"}],
        "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2.0]}],
    }


def test_options_become_the_headers_of_the_contract() -> None:
    own = [("kafka_correlationId", b"\x00\xff"), ("ce_id", None)]
    _, headers = build_request({"x": [1]}, model="m", version="2", timeout_ms=50, priority=1, headers=own)
    assert headers[2:] == [
        ("model", b"m"),
        ("model-version", b"2"),
        ("timeout-ms", b"50"),
        ("priority", b"1"),
        *own,
    ]
    text = {name: content.decode() for name, content in headers if content and name != "kafka_correlationId"}
    assert RequestHeaders.model_validate(text).timeout_ms == "50"


def test_both_encodings_satisfy_the_schema() -> None:
    for encoding in ("binary", "json"):
        value, headers = build_request({"x": [[1, 2]], "t": ["a"]}, encoding=encoding, id="r")
        length = int(dict(headers).get("inference-header-content-length", len(value)))
        request = InferenceRequest.model_validate_json(value[:length])
        assert (request.id, request.rows, [tensor.name for tensor in request.inputs]) == ("r", 1, ["x", "t"])


def test_an_id_header_precedes_the_bodys_id() -> None:
    value, headers = build_request({"x": [1]}, id="body", headers=[("x-request-id", b"header")])
    assert parse_request(value, headers).id == "header"


@pytest.mark.parametrize("id", ["", "x" * 257, "é" * 129])
def test_an_id_that_the_worker_would_refuse_is_refused_here(id: str) -> None:
    with pytest.raises(WireError, match="1 to 256 bytes"):
        build_request({"x": [1]}, id=id)


@pytest.mark.parametrize("encoding", ["binary", "json"])
def test_a_result_comes_back_with_its_arrays_and_what_its_headers_say(encoding: str) -> None:
    value, headers = build_result(
        {"y": np.eye(2, dtype=np.float32), "t": ["a", "b"]}, id="r", model="m", version="3", encoding=encoding
    )
    headers += [("source", b"in/0/7"), ("batch-size", b"16")]
    result = parse_result(value, headers)
    np.testing.assert_array_equal(result["y"], np.eye(2, dtype=np.float32))
    assert result["t"] == [b"a", b"b"]
    with pytest.raises(KeyError, match="no output 'Y'; there is y, t"):
        result["Y"]
    assert (result.id, result.model, result.version, result.source, result.batch_size) == ("r", "m", "3", "in/0/7", 16)
    length = int(dict(headers).get("inference-header-content-length", len(value)))
    assert InferenceResult.model_validate_json(value[:length]).id == "r"
    text = {name: content.decode() for name, content in headers}
    assert ResultHeaders.model_validate(text).batch_size == "16"


@pytest.mark.parametrize("code", list(Code))
def test_every_error_result_is_raised_with_code_message_and_retriable(code: Code) -> None:
    value, headers = build_error("r", code, "it went wrong")
    with pytest.raises(InferenceError, match=f"{code.value}: it went wrong") as caught:
        parse_result(value, headers)
    assert (caught.value.id, caught.value.message, caught.value.retriable) == ("r", "it went wrong", code in RETRIABLE)
    assert ErrorResult.model_validate_json(value).code == code.value
    assert isinstance(parse_outcome(value, headers), InferenceError)


BINARY = ("content-type", b"application/octet-stream")
LENGTH = "inference-header-content-length"
TENSOR = '{"inputs":[{"name":"x","shape":[1],"datatype":"%s","parameters":{"binary_data_size":%d}}]}'


@pytest.mark.parametrize(
    ("value", "headers", "sentence"),
    [
        (b"{", [], "the value is not JSON"),
        (b"[1]", [], "not a JSON object"),
        (b"{}", [("content-type", b"text/plain")], "'text/plain' is neither"),
        (b"{}", [BINARY], "must say how many bytes"),
        (b"{}", [BINARY, (LENGTH, b"3")], "must say how many bytes"),
        (b"{}", [BINARY, (LENGTH, b"-1")], "must say how many bytes"),
        (b'{"inputs":[{"name":"x"}]}', [], "inputs is not a list of tensors"),
        (b'{"inputs":7}', [], "inputs is not a list of tensors"),
        (b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":["a"]}]}', [], "x: "),
        (
            (TENSOR % ("FP32", 4)).encode() + b"\0\0\0",
            [BINARY, (LENGTH, b"%d" % len(TENSOR % ("FP32", 4)))],
            "announced",
        ),
        (
            (TENSOR % ("FP32", 3)).encode() + b"\0\0\0",
            [BINARY, (LENGTH, b"%d" % len(TENSOR % ("FP32", 3)))],
            "does not",
        ),
        ((TENSOR % ("FP9", 0)).encode(), [BINARY, (LENGTH, b"%d" % len(TENSOR % ("FP9", 0)))], "unknown datatype"),
        (
            (TENSOR % ("BYTES", 5)).encode() + b"\xff\0\0\0a",
            [BINARY, (LENGTH, b"%d" % len(TENSOR % ("BYTES", 5)))],
            "ends behind its tensor",
        ),
        (
            (TENSOR % ("UINT8", 1)).encode() + b"\0\0",
            [BINARY, (LENGTH, b"%d" % len(TENSOR % ("UINT8", 1)))],
            "1 bytes follow the last tensor",
        ),
    ],
)
def test_a_value_that_cannot_be_read_is_told_in_one_sentence(value: bytes, headers: list, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        parse_request(value, headers)


def test_a_result_shows_itself_in_a_line_whatever_its_size() -> None:
    """The repr of a large result was pages long: every element of its tensors, and every header."""
    outputs = {
        "p": np.zeros((1, 100_000), np.float32),
        "ids": np.arange(3),
        "none": np.zeros((0, 4), np.float16),
        "image": [b"\xff" * 5000],
        "texts": [b"a", b"b"],
    }
    shown = repr(
        Result("r1", outputs, "m", "2", headers=[("batch-size", b"8"), ("source", b"t/0/7"), ("x", b"y" * 999)])
    )
    assert shown.startswith("Result(id='r1', model='m', version='2', batch_size=8, source='t/0/7', outputs={")
    assert "'p': float32[1, 100000] 0 0 0 0 0 0 …, 'ids': int64[3] 0 1 2, 'none': float16[0, 4], " in shown
    assert shown.endswith("…], 'texts': [b'a', … 2 elements]})")
    assert len(shown) < 500
