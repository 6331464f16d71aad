"""Decoding: which record becomes which request, and which refusal the others get. Nothing is ever an exception."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.records import Code, Encoding, Headers, Record, Reply, Request, TensorShape
from forebay.settings import Limits
from forebay.stream.codec import DEFAULT_PRIORITY, Decoder, Refusal
from forebay.wire import Tensor, build_request
from tests.unit.builders import NOW, NOW_MS, as_floats, record, signature, vector_request

TWO = [
    signature(),
    signature(model="other", version="8"),
]


def decoder(**limits: int) -> Decoder:
    return Decoder(TWO, Limits(**limits), [r"replies\..*", "own"])


def decoded(one: Record, using: Decoder | None = None) -> Request:
    found = (using or decoder()).decode(one, NOW, NOW_MS)
    assert isinstance(found, Request), found.failure
    return found


def refused(one: Record, code: Code, using: Decoder | None = None) -> Refusal:
    found = (using or decoder()).decode(one, NOW, NOW_MS)
    assert isinstance(found, Refusal)
    assert found.failure.code is code, found.failure
    assert found.failure.message
    return found


def plain(**options: Any) -> Record:
    """A valid request; `headers` come behind its own."""
    encoding = options.pop("encoding", "json")
    more: Headers = options.pop("headers", [])
    where = {name: options.pop(name) for name in ("key", "offset", "timestamp_ms") if name in options}
    value, headers = vector_request(encoding=encoding, **options)
    return record(value, [*headers, *more], **where)


def with_body(**changes: Any) -> Record:
    body: dict[str, Any] = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0, 1, 2, 3]}]}
    return record(json.dumps({**body, **changes}).encode())


def in_binary(head: Any, raw: bytes = bytes(16), length: int | None = None) -> Record:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    size = len(text) if length is None else length
    return record(
        text + raw,
        [("content-type", b"application/octet-stream"), ("inference-header-content-length", b"%d" % size)],
    )


BOTH = pytest.mark.parametrize("encoding", ["json", "binary"])

# ---------------------------------------------------------------------- what a good request becomes


@BOTH
def test_a_request_is_decoded_in_either_encoding(encoding: Any) -> None:
    found = decoded(plain(start=5, rows=2, encoding=encoding))
    assert as_floats(found.tensors[0]) == [5, 6, 7, 8, 6, 7, 8, 9]
    assert (found.rows, list(found.shapes), found.item_bytes) == (2, [(2, 4)], 32)
    assert found.encoding is (Encoding.BINARY if encoding == "binary" else Encoding.JSON)
    assert (found.model, found.arrived, found.deadline, found.priority) == ("model", NOW, None, DEFAULT_PRIORITY)
    assert (found.reply, found.wanted, found.echo, found.attempts) == (None, None, [], 0)


@pytest.mark.parametrize("kind", [b"application/json", b"application/json; charset=utf-8", b"Application/JSON", b""])
def test_json_is_recognised_by_its_content_type_with_or_without_parameters(kind: bytes) -> None:
    assert decoded(record(vector_request(encoding="json")[0], [("content-type", kind)])).encoding is Encoding.JSON


def test_a_request_without_a_content_type_is_json() -> None:
    assert decoded(record(vector_request(encoding="json")[0])).encoding is Encoding.JSON


def test_another_content_type_is_refused() -> None:
    refused(record(b"<x/>", [("content-type", b"application/xml")]), Code.UNSUPPORTED_TYPE)


# ---------------------------------------------------------------------- ids


@BOTH
def test_the_id_is_the_first_of_header_body_key_and_position(encoding: Any) -> None:
    header: Headers = [("x-request-id", b"from-header")]
    assert decoded(plain(encoding=encoding, headers=header, id="from-body", key=b"from-key")).id == "from-header"
    assert decoded(plain(encoding=encoding, id="from-body", key=b"from-key")).id == "from-body"
    assert decoded(plain(encoding=encoding, key="schlüssel".encode())).id == "schlüssel"
    assert decoded(plain(encoding=encoding, key=b"\xff\xfe", offset=41)).id == "requests/0/41"
    assert decoded(plain(encoding=encoding, offset=42)).id == "requests/0/42"


def test_empty_ids_and_keys_count_as_absent() -> None:
    one = with_body(id="")
    one.headers, one.key, one.offset = [("x-request-id", b"")], b"", 9
    assert decoded(one).id == "requests/0/9"


def test_a_key_longer_than_an_id_may_be_is_passed_over() -> None:
    assert decoded(plain(key=b"k" * 256, offset=1)).id == "k" * 256
    assert decoded(plain(key=b"k" * 257, offset=1)).id == "requests/0/1"


@pytest.mark.parametrize("bad", [7, ["a"], {"a": 1}, True, "i" * 257, "ü" * 129])
def test_an_id_of_another_type_or_length_is_refused(bad: Any) -> None:
    refused(with_body(id=bad), Code.INVALID_PAYLOAD)
    head = {"id": bad, "inputs": [_binary_input()]}
    refused(in_binary(head), Code.INVALID_PAYLOAD)


def test_an_id_header_too_long_or_not_text_is_refused() -> None:
    refused(plain(headers=[("x-request-id", b"i" * 257)]), Code.INVALID_PAYLOAD)
    refused(plain(headers=[("x-request-id", b"\xff")]), Code.INVALID_PAYLOAD)


def test_a_refusal_carries_the_best_id_that_can_be_found() -> None:
    assert refused(record(b"{", key=b"key"), Code.INVALID_PAYLOAD).id == "key"
    assert refused(record(b"{", offset=3), Code.INVALID_PAYLOAD).id == "requests/0/3"
    assert refused(record(b'{"id": "body", "inputs": 5}', key=b"key"), Code.INVALID_PAYLOAD).id == "body"
    assert refused(record(b"{", [("x-request-id", b"header")]), Code.INVALID_PAYLOAD).id == "header"
    unknown = plain(id="body", headers=[("model", b"nobody")], key=b"key")
    assert refused(unknown, Code.UNKNOWN_MODEL).id == "body"
    unknown = plain(id="body", encoding="binary", headers=[("model", b"nobody")], key=b"key")
    assert refused(unknown, Code.UNKNOWN_MODEL).id == "body"


# ---------------------------------------------------------------------- payloads that are refused


@pytest.mark.parametrize("value", [None, b""])
def test_a_record_without_a_value_is_refused(value: bytes | None) -> None:
    assert "no value" in refused(record(value), Code.INVALID_PAYLOAD).failure.message


def test_a_record_that_could_not_be_read_says_why() -> None:
    found = refused(record(None, [("forebay-unreadable", b"bad compression")]), Code.INVALID_PAYLOAD)
    assert "bad compression" in found.failure.message


@pytest.mark.parametrize("header", [b"\xff\xfe", None])
def test_an_unreadable_reason_that_is_not_text_harms_nobody(header: bytes | None) -> None:
    """Any producer may set that header; bytes that are not UTF-8 ended the worker."""
    refused(record(None, [("forebay-unreadable", header)]), Code.INVALID_PAYLOAD)


@pytest.mark.parametrize(
    "value",
    [b"{", b"nonsense", b"\xff\xfe\x00", b"[]", b"5", b"null", b'"text"', b"{}", b'{"inputs": {}}', b'{"inputs": 1}',
     b'{"inputs": [5]}', b'{"inputs": [[]]}', b'{"inputs": null}', b"{} {}", b"\xef\xbb\xbf{}", b'{"id": "\xff"}',
     b"[" * 5_000, b'{"a":' * 5_000],
)  # fmt: skip
def test_what_is_no_request_at_all_is_refused(value: bytes) -> None:
    refused(record(value), Code.INVALID_PAYLOAD)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "01", ".5", "+1", "0x10"])
def test_numbers_that_json_does_not_have_are_refused(number: str) -> None:
    text = f'{{"inputs": [{{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0, {number}, 2, 3]}}]}}'
    refused(record(text.encode()), Code.INVALID_PAYLOAD)


def test_a_value_above_the_limit_is_refused_before_it_is_read() -> None:
    using = decoder(max_request_bytes=100)
    found = refused(record(b"x" * 101), Code.TOO_LARGE, using)
    assert "101" in found.failure.message
    assert "100" in found.failure.message
    refused(record(b"x" * 100), Code.INVALID_PAYLOAD, using)


@pytest.mark.parametrize("length", [b"", b"abc", b"-1", b"1.5", b"9" * 40, b"\xb2", None])
def test_a_binary_request_needs_a_number_for_the_length_of_its_head(length: bytes | None) -> None:
    headers: Headers = [("content-type", b"application/octet-stream"), ("inference-header-content-length", length)]
    refused(record(b"{}", headers), Code.INVALID_PAYLOAD)


@pytest.mark.parametrize("length", [0, 10_000])
def test_a_head_outside_the_value_is_refused(length: int) -> None:
    refused(in_binary({"inputs": [_binary_input()]}, length=length), Code.INVALID_PAYLOAD)


@pytest.mark.parametrize(
    "head",
    [b"{", b"[]", b"{}", b'{"inputs": 5}', b'{"inputs": [{}]}', b'{"inputs": [{"name": 1}]}', b"\xff\xff", b"null",
     b'{"inputs": [], "parameters": 5}', b'{"inputs": [], "outputs": 5}', b"[" * 5_000, b'{"id":' * 5_000],
)  # fmt: skip
def test_a_head_that_is_no_request_is_refused(head: bytes) -> None:
    refused(in_binary(head), Code.INVALID_PAYLOAD)


def _binary_input(size: Any = 16, **changes: Any) -> dict[str, Any]:
    made = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    return {**made, **changes}


@pytest.mark.parametrize("raw", [bytes(15), bytes(17), b""])
def test_a_binary_value_with_too_few_or_too_many_bytes_is_refused(raw: bytes) -> None:
    refused(in_binary({"inputs": [_binary_input()]}, raw), Code.INVALID_PAYLOAD)


@pytest.mark.parametrize("size", [15, 0, -16, 1 << 70, True, 16.0, "16"])
def test_a_binary_size_that_does_not_fit_the_shape_is_refused(size: Any) -> None:
    refused(in_binary({"inputs": [_binary_input(size)]}), Code.INVALID_TENSOR)


# ---------------------------------------------------------------------- headers


def test_too_many_headers_are_refused() -> None:
    many: Headers = [(f"h{number}", b"") for number in range(65)]
    refused(plain(headers=many), Code.INVALID_PAYLOAD)
    decoded(plain(headers=many[:60]))


def test_headers_to_echo_that_are_too_large_are_refused_and_not_echoed() -> None:
    found = refused(plain(headers=[("traceparent", b"t" * 20_000)]), Code.INVALID_PAYLOAD)
    assert found.echo == []


def test_large_headers_that_are_not_echoed_harm_nobody() -> None:
    decoded(plain(headers=[("mine", b"m" * 1_000_000)]))


ECHO: Headers = [
    ("kafka_correlationId", b"\x00\xff"),
    ("correlation_id", b"c"),
    ("traceparent", b"00-a-b-01"),
    ("tracestate", None),
    ("baggage", b"k=v"),
    ("ce_type", b"t"),
    ("ce_id", b"1"),
]


@BOTH
def test_correlation_trace_and_cloud_events_headers_are_echoed_unchanged(encoding: Any) -> None:
    own: Headers = [("mine", b"1"), ("content-language", b"de")]
    assert decoded(plain(encoding=encoding, headers=[*ECHO, *own])).echo == ECHO


def test_a_refusal_echoes_too_whatever_was_wrong() -> None:
    for first in (("priority", b"high"), ("timeout-ms", b"-5"), ("content-type", b"x/y"), ("x-request-id", b"\xff")):
        found = decoder().decode(plain(headers=[first, *ECHO]), NOW, NOW_MS)
        assert isinstance(found, Refusal)
        assert found.echo == ECHO
    assert refused(record(b"{", ECHO), Code.INVALID_PAYLOAD).echo == ECHO


@pytest.mark.parametrize("name", ["timeout-ms", "deadline-ms", "priority"])
@pytest.mark.parametrize("value", [b"-1", b"1.5", b"soon", b"", b"9" * 30, "٣".encode()])
def test_a_number_header_that_is_no_number_is_refused(name: str, value: bytes) -> None:
    assert name in refused(plain(headers=[(name, value)]), Code.INVALID_PAYLOAD).failure.message


def test_a_time_out_counts_from_the_timestamp_of_the_record() -> None:
    one = plain(headers=[("timeout-ms", b"500")], timestamp_ms=int(NOW_MS) - 200)
    assert decoded(one).deadline == pytest.approx(NOW + 0.3)


@BOTH
def test_a_time_out_in_the_body_is_in_microseconds(encoding: Any) -> None:
    one = plain(encoding=encoding, parameters={"timeout": 500_000}, timestamp_ms=int(NOW_MS) - 200)
    assert decoded(one).deadline == pytest.approx(NOW + 0.3)


def test_a_time_out_of_a_record_without_a_timestamp_counts_from_its_arrival() -> None:
    """With timestamp -1 a time-out in a header lay in 1970, one in the body did not."""
    for one in (plain(headers=[("timeout-ms", b"500")]), plain(parameters={"timeout": 500_000})):
        one.timestamp_ms = -1
        assert decoded(one).deadline == pytest.approx(NOW + 0.5)


def test_a_deadline_is_absolute() -> None:
    one = plain(headers=[("deadline-ms", b"%d" % (NOW_MS + 250))], timestamp_ms=0)
    assert decoded(one).deadline == pytest.approx(NOW + 0.25)


def test_the_earliest_of_several_deadlines_holds() -> None:
    late, early = b"%d" % (NOW_MS + 900), b"300"
    one = plain(headers=[("deadline-ms", late), ("timeout-ms", early)], parameters={"timeout": 600_000})
    assert decoded(one).deadline == pytest.approx(NOW + 0.3)
    one = plain(headers=[("deadline-ms", late)], parameters={"timeout": 100_000})
    assert decoded(one).deadline == pytest.approx(NOW + 0.1)


@BOTH
@pytest.mark.parametrize("bad", [{"timeout": "soon"}, {"timeout": True}, {"priority": 1.5}, {"priority": -1},
                                 {"priority": True}, {"priority": "high"}])  # fmt: skip
def test_parameters_of_another_type_are_refused(encoding: Any, bad: Any) -> None:
    refused(plain(encoding=encoding, parameters=bad), Code.INVALID_PAYLOAD)


@pytest.mark.parametrize("text", ["1" + "0" * 400, "1e300", "1" + "0" * 30, "-" + "1" * 400])
def test_a_time_out_beyond_all_numbers_is_no_exception(text: str) -> None:
    head = b'{"inputs": [%s], "parameters": {"timeout": %s}}' % (json.dumps(_binary_input()).encode(), text.encode())
    for one in (in_binary(head), record(head)):
        assert decoder().decode(one, NOW, NOW_MS)


@pytest.mark.parametrize(("level", "expected"), [(0, DEFAULT_PRIORITY), (1, 1), (5, 5), (9, 9), (10, 9), (4_000, 9)])
def test_priority_one_is_highest_and_zero_is_the_default(level: int, expected: int) -> None:
    assert decoded(plain(headers=[("priority", b"%d" % level)])).priority == expected
    for encoding in ("json", "binary"):
        assert decoded(plain(parameters={"priority": level}, encoding=encoding)).priority == expected


def test_a_priority_in_a_header_goes_before_one_in_the_body() -> None:
    assert decoded(plain(headers=[("priority", b"2")], parameters={"priority": 8})).priority == 2
    assert decoded(plain(headers=[("priority", b"0")], parameters={"priority": 8})).priority == 8


# ---------------------------------------------------------------------- models and replies


def _model_of(headers: Headers) -> tuple[str, Any]:
    found = decoded(plain(headers=headers))
    return found.model, found.lane[0]  # type: ignore[index]


def test_a_request_goes_to_the_model_that_it_names() -> None:
    assert _model_of([]) == ("model", "model")
    for name, version in (("model", "model-version"), ("mlserver-model", "mlserver-version")):
        assert _model_of([(name, b"other")])[0] == "other"
        assert _model_of([(name, b"other"), (version, b"8")])[0] == "other"
    assert _model_of([("model-version", b"1")])[0] == "model"
    assert _model_of([("model", b"")])[0] == "model"


@pytest.mark.parametrize(
    ("headers", "mentions"),
    [([("model", b"nobody")], "other"), ([("model", b"other"), ("model-version", b"9")], "it has 8"),
     ([("model-version", b"2")], "'2'"), ([("mlserver-version", b"2")], "'2'")],
)  # fmt: skip
def test_a_model_that_is_not_served_is_refused_with_those_that_are(headers: Headers, mentions: str) -> None:
    assert mentions in refused(plain(headers=headers), Code.UNKNOWN_MODEL).failure.message


def test_a_model_name_that_is_not_text_is_refused() -> None:
    refused(plain(headers=[("model", b"\xff")]), Code.INVALID_PAYLOAD)


def test_a_reply_goes_to_the_topic_and_partition_that_the_request_names() -> None:
    headers: Headers = [("kafka_replyTopic", b"replies.me"), ("kafka_replyPartition", (258).to_bytes(4, "big"))]
    assert decoded(plain(headers=headers)).reply == Reply("replies.me", 258)
    assert decoded(plain(headers=headers[:1])).reply == Reply("replies.me", None)
    assert decoded(plain(headers=headers[1:])).reply is None


@pytest.mark.parametrize("topic", [b"secret", b"replies", b"xreplies.a", b"own2", b""])
def test_a_reply_topic_that_no_pattern_matches_whole_is_refused(topic: bytes) -> None:
    assert refused(plain(headers=[("kafka_replyTopic", topic)]), Code.REPLY_NOT_ALLOWED).reply is None


@pytest.mark.parametrize("partition", [b"", b"1", b"12345", b"\xff\xff\xff\xff", b"\x80\x00\x00\x00"])
def test_a_reply_partition_that_is_no_partition_is_refused(partition: bytes) -> None:
    """A negative one became 4,294,967,295, which the client's produce() takes no better than text."""
    headers: Headers = [("kafka_replyTopic", b"own"), ("kafka_replyPartition", partition)]
    refused(plain(headers=headers), Code.INVALID_PAYLOAD)


def test_a_refusal_is_sent_where_its_request_asked_for() -> None:
    headers: Headers = [("kafka_replyTopic", b"own"), ("kafka_replyPartition", (1).to_bytes(4, "big"))]
    assert refused(record(b"{", headers), Code.INVALID_PAYLOAD).reply == Reply("own", 1)


@pytest.mark.parametrize("value", [None, b"{", b"x" * 200])
def test_a_bad_record_that_also_names_a_forbidden_reply_topic_is_refused_to_the_output_topic(
    value: bytes | None,
) -> None:
    """The second refusal was raised outside of every try and ended the worker."""
    one = record(value, [("kafka_replyTopic", b"secret")])
    found = decoder(max_request_bytes=100).decode(one, NOW, NOW_MS)
    assert isinstance(found, Refusal)
    assert found.reply is None
    one = record(b"{}", [("priority", b"high"), ("kafka_replyTopic", b"secret")])
    assert refused(one, Code.INVALID_PAYLOAD).reply is None


# ---------------------------------------------------------------------- outputs


@BOTH
def test_a_request_may_name_the_outputs_that_it_wants(encoding: Any) -> None:
    outputs = [TensorShape(name, "FP32", (-1, 2)) for name in ("a", "b", "c")]
    using = Decoder([signature(outputs=outputs)], Limits())
    assert decoded(plain(encoding=encoding, outputs=["c", "a"]), using).wanted == (2, 0)
    assert decoded(plain(encoding=encoding), using).wanted is None
    refused(plain(encoding=encoding, outputs=["z"]), Code.INVALID_TENSOR, using)


def test_an_empty_list_of_outputs_means_all() -> None:
    assert decoded(with_body(outputs=[])).wanted is None


@pytest.mark.parametrize("outputs", [[5], [None], [{}], [{"name": 5}], [{"name": ["y"]}], [["y"]]])
def test_outputs_that_name_nothing_are_refused(outputs: Any) -> None:
    found = decoder().decode(with_body(outputs=outputs), NOW, NOW_MS)
    assert isinstance(found, Refusal)
    assert found.failure.code in (Code.INVALID_TENSOR, Code.INVALID_PAYLOAD)
    found = decoder().decode(in_binary({"inputs": [_binary_input()], "outputs": outputs}), NOW, NOW_MS)
    assert isinstance(found, Refusal)


# ---------------------------------------------------------------------- equal requests share no secrets


@BOTH
def test_equal_requests_keep_their_own_ids_deadlines_and_echoes(encoding: Any) -> None:
    using = decoder()
    for number in range(4):
        mark = b"%d" % number
        headers: Headers = [("kafka_correlationId", mark), ("timeout-ms", b"100")]
        one = plain(encoding=encoding, headers=headers, key=mark, timestamp_ms=int(NOW_MS) + number * 1_000)
        found = decoded(one, using)
        assert (found.id, found.echo) == (mark.decode(), [("kafka_correlationId", mark)])
        assert found.deadline == pytest.approx(NOW + number + 0.1)
        assert found.record is one
        bare = decoded(plain(encoding=encoding, offset=number), using)
        assert (bare.id, bare.echo, bare.deadline) == (f"requests/0/{number}", [], None)


@BOTH
def test_equal_requests_with_a_time_out_in_the_body_have_deadlines_of_their_own(encoding: Any) -> None:
    using = decoder()
    for number in range(3):
        one = plain(encoding=encoding, parameters={"timeout": 1_000}, timestamp_ms=int(NOW_MS) + number * 1_000)
        assert decoded(one, using).deadline == pytest.approx(NOW + number + 0.001)


@BOTH
def test_equal_requests_with_other_tensors_have_their_own(encoding: Any) -> None:
    using = decoder()
    found = [decoded(plain(start=start, encoding=encoding), using) for start in (0, 7, 3)]
    assert [as_floats(one.tensors[0])[0] for one in found] == [0, 7, 3]


def test_the_body_id_of_one_record_never_appears_in_the_refusal_of_the_next() -> None:
    using = decoder()
    decoded(plain(id="secret"), using)
    assert refused(record(None, offset=8), Code.INVALID_PAYLOAD, using).id == "requests/0/8"
    refused(with_body(id="secret", inputs=5), Code.INVALID_PAYLOAD, using)
    assert refused(record(b"x", offset=9), Code.INVALID_PAYLOAD, using).id == "requests/0/9"


def test_what_is_appended_to_one_echo_is_in_no_other() -> None:
    using = decoder()
    first = decoded(plain(headers=[("mine", b"1")]), using)
    first.echo.append(("leak", b"1"))
    assert decoded(plain(headers=[("mine", b"1")]), using).echo == []


def test_inline_tensors_of_a_remembered_head_are_right_for_every_model() -> None:
    head = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
    using = decoder()
    for _ in range(3):
        assert as_floats(decoded(in_binary(head, b""), using).tensors[0]) == [1, 2, 3, 4]
    other = in_binary(head, b"")
    other.headers.append(("model", b"other"))
    assert decoded(other, using).model == "other"


# ---------------------------------------------------------------------- anything at all

WORDS = ["inputs", "id", "name", "shape", "datatype", "data", "parameters", "outputs", "binary_data_size", "timeout",
         "priority", "x", "y", "FP32", "BYTES", "\ud800", "\udc00x", ""]  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=5)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=12,
)
HEADER_NAMES = ["content-type", "x-request-id", "inference-header-content-length", "model", "model-version", "baggage",
                "timeout-ms", "deadline-ms", "priority", "kafka_replyTopic", "kafka_replyPartition", "ce_x",
                "forebay-unreadable"]  # fmt: skip
HEADER_VALUES = (
    st.none()
    | st.binary(max_size=6)
    | st.sampled_from(
        [b"application/json", b"application/octet-stream", b"own", b"model", b"other", b"12", b"40", b"\0\0\0\1"]
    )
)


@st.composite
def near_requests(draw: st.DrawFn) -> bytes:
    """JSON that is a request but for some of its parts."""
    entry = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    entry |= draw(st.dictionaries(st.sampled_from(list(entry)), DOCUMENTS, max_size=2))
    body: dict[str, Any] = {"inputs": [entry]}
    body |= draw(st.dictionaries(st.sampled_from(["id", "parameters", "outputs", "inputs"]), DOCUMENTS, max_size=2))
    return json.dumps(body).encode()


VALUES = st.none() | st.binary(max_size=60) | near_requests() | DOCUMENTS.map(lambda it: json.dumps(it).encode())
FUZZED = decoder(max_request_bytes=2_000)


@settings(max_examples=150)
@given(
    value=VALUES,
    raw=st.binary(max_size=20),
    headers=st.lists(st.tuples(st.sampled_from(HEADER_NAMES), HEADER_VALUES), max_size=6),
    binary=st.booleans(),
    key=st.none() | st.binary(max_size=8),
)
def test_any_bytes_give_a_request_or_a_refusal_and_never_an_exception(
    value: bytes | None, raw: bytes, headers: Headers, binary: bool, key: bytes | None
) -> None:
    if binary and value is not None:
        length = b"%d" % len(value)
        value += raw
        headers = [
            *headers, ("content-type", b"application/octet-stream"), ("inference-header-content-length", length)
        ]  # fmt: skip
    found = FUZZED.decode(record(value, headers, key=key), NOW, NOW_MS)
    assert found.id
    found.id.encode()
    found.model.encode()
    if isinstance(found, Refusal):
        found.failure.message.encode()
        return
    assert found.rows >= 1
    assert 1 <= found.priority <= 9
    assert found.deadline is None or np.isfinite(found.deadline)
    assert sum(map(len, found.tensors)) == found.item_bytes


@given(rows=st.integers(1, 4), encoding=st.sampled_from(["json", "binary"]), numbers=st.data())
def test_what_is_sent_is_what_arrives(rows: int, encoding: Any, numbers: st.DataObject) -> None:
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    sent = numbers.draw(st.lists(finite, min_size=4 * rows, max_size=4 * rows))
    tensor = Tensor(np.array(sent, "<f4").reshape(rows, 4), "FP32")
    value, headers = build_request({"x": tensor}, encoding=encoding)
    assert as_floats(decoded(record(value, headers)).tensors[0]) == sent
