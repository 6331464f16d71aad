"""Tensors on the wire: every datatype in both encodings, and what is refused, with the input's name in the sentence."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.records import Code, Request, Signature, TensorData, TensorShape
from forebay.settings import Limits
from forebay.stream.codec import Decoder, Refusal
from forebay.wire import Tensor, build_request
from tests.unit.builders import NOW, NOW_MS, record, signature

NUMERIC: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("?", [True, False, True, True]),
    "UINT8": ("u1", [0, 1, 254, 255]),
    "UINT16": ("<u2", [0, 1, 2, 65_535]),
    "UINT32": ("<u4", [0, 1, 2, 2**32 - 1]),
    "UINT64": ("<u8", [0, 2**53 + 1, 2**63, 2**64 - 1]),
    "INT8": ("i1", [-128, -1, 0, 127]),
    "INT16": ("<i2", [-32_768, 0, 1, 32_767]),
    "INT32": ("<i4", [-(2**31), 0, 1, 2**31 - 1]),
    "INT64": ("<i8", [-(2**63), 2**53 + 1, 0, 2**63 - 1]),
    "FP16": ("<f2", [0.0, -1.5, 65_504.0, 6e-8]),
    "FP32": ("<f4", [0.0, -0.1, 3.4e38, 1e-45]),
    "FP64": ("<f8", [0.0, -0.1, 1.7e308, 5e-324]),
}
BINARY_ONLY = ("FP16", "BF16")


def one_input(datatype: str, *dims: int, pad: float | None = None, name: str = "x") -> Signature:
    return signature([TensorShape(name, datatype, (-1, *dims), pad)])


def decode(model: Signature, value: bytes, headers: Any = ()) -> Request | Refusal:
    return Decoder([model], Limits()).decode(record(value, headers), NOW, NOW_MS)


def accepted(model: Signature, value: bytes, headers: Any = ()) -> Request:
    found = decode(model, value, headers)
    assert isinstance(found, Request), found.failure
    return found


def refused(model: Signature, value: bytes, headers: Any = (), code: Code = Code.INVALID_TENSOR) -> str:
    found = decode(model, value, headers)
    assert isinstance(found, Refusal)
    assert found.failure.code is code, found.failure
    return found.failure.message


def body(datatype: str, shape: Any, data: Any, name: Any = "x") -> bytes:
    return json.dumps({"inputs": [{"name": name, "shape": shape, "datatype": datatype, "data": data}]}).encode()


def raw(tensor: TensorData) -> bytes:
    assert not isinstance(tensor, list)
    return bytes(tensor)


@pytest.mark.parametrize(
    ("datatype", "encoding"),
    [(datatype, "binary") for datatype in NUMERIC] + [(kind, "json") for kind in NUMERIC if kind not in BINARY_ONLY],
)
def test_every_numeric_datatype_arrives_bit_for_bit(datatype: str, encoding: Any) -> None:
    dtype, values = NUMERIC[datatype]
    array = np.array([values, values[::-1]], dtype)
    value, headers = build_request({"x": Tensor(array, datatype)}, encoding=encoding)
    found = accepted(one_input(datatype, 4), value, headers)
    assert raw(found.tensors[0]) == array.tobytes()
    assert (found.rows, found.shapes[0], found.item_bytes) == (2, (2, 4), array.nbytes)


def test_bfloat16_arrives_bit_for_bit() -> None:
    bits = np.array([[0, 0x3F80, 0x7F80, 0xFFFF]], "<u2")
    value, headers = build_request({"x": Tensor(bits, "BF16")})
    assert raw(accepted(one_input("BF16", 4), value, headers).tensors[0]) == bits.tobytes()


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16"])
def test_binary_carries_what_json_cannot(datatype: str) -> None:
    array = np.array([[np.nan, np.inf, -np.inf]], NUMERIC[datatype][0])
    value, headers = build_request({"x": Tensor(array, datatype)})
    assert raw(accepted(one_input(datatype, 3), value, headers).tensors[0]) == array.tobytes()


TEXTS = ["", "a", "Grüße", "\0", "x" * 5_000]


@pytest.mark.parametrize("encoding", ["json", "binary"])
def test_text_arrives_element_by_element(encoding: Any) -> None:
    value, headers = build_request({"x": TEXTS}, encoding=encoding)
    found = accepted(one_input("BYTES"), value, headers)
    assert found.tensors[0] == [text.encode() for text in TEXTS]
    assert found.rows == 5
    assert found.item_bytes == sum(4 + len(text.encode()) for text in TEXTS)


def test_bytes_that_are_no_text_arrive_in_binary() -> None:
    parts = [b"\xff\x00", b"", bytes(range(256))]
    value, headers = build_request({"x": parts})
    assert accepted(one_input("BYTES"), value, headers).tensors[0] == parts


@pytest.mark.parametrize("datatype", BINARY_ONLY)
def test_16_bit_floats_are_refused_in_json(datatype: str) -> None:
    assert "x" in refused(one_input(datatype, 2), body(datatype, [1, 2], [1.0, 2.0]), code=Code.UNSUPPORTED_TYPE)


# ---------------------------------------------------------------------- JSON numbers


@pytest.mark.parametrize(
    ("datatype", "number"),
    [("UINT8", 256), ("UINT8", -1), ("INT8", 128), ("INT8", -129), ("UINT16", 65_536), ("INT16", 40_000),
     ("UINT32", 2**32), ("INT32", 2**31), ("INT32", -(2**31) - 1), ("INT64", 2**63), ("UINT64", -1)],
)  # fmt: skip
def test_whole_numbers_out_of_range_are_refused(datatype: str, number: int) -> None:
    assert "x" in refused(one_input(datatype, 2), body(datatype, [1, 2], [0, number]))


@pytest.mark.parametrize(("datatype", "number"), [("UINT64", 2**64), ("INT64", -(2**63) - 1)])
def test_whole_numbers_beyond_64_bits_are_refused_like_others_out_of_range(datatype: str, number: int) -> None:
    """The parser raises RuntimeError for them, as it does for a document in use: a thousand parsers were made."""
    assert "x" in refused(one_input(datatype, 2), body(datatype, [1, 2], [0, number]))


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_a_float_that_javascript_wrote_with_all_its_digits_is_a_number(datatype: str) -> None:
    """`JSON.stringify(1e20)` is 100000000000000000000: valid JSON, and no whole number that fits 64 bits."""
    request = accepted(one_input(datatype, 2), body(datatype, [1, 2], [0, 10**20]))
    values = np.frombuffer(request.tensors[0], "<f4" if datatype == "FP32" else "<f8")
    assert values.tolist() == [0, float(np.float32(1e20)) if datatype == "FP32" else 1e20]


@pytest.mark.parametrize("datatype", ["UINT8", "INT32", "INT64", "UINT64"])
@pytest.mark.parametrize("element", [1.0, 1.5, "1", True, None, {}])
def test_an_element_that_is_no_whole_number_is_refused(datatype: str, element: Any) -> None:
    refused(one_input(datatype, 2), body(datatype, [1, 2], [0, element]))


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
@pytest.mark.parametrize("element", ["1", True, None, {}])
def test_an_element_that_is_no_number_is_refused(datatype: str, element: Any) -> None:
    refused(one_input(datatype, 2), body(datatype, [1, 2], [0, element]))


@pytest.mark.parametrize("number", [1e39, -3.5e38, 1e308])
def test_a_number_beyond_fp32_is_refused_and_not_made_infinite(number: float) -> None:
    assert "FP32" in refused(one_input("FP32", 2), body("FP32", [1, 2], [0, number]))


def test_floats_may_be_written_as_whole_numbers() -> None:
    found = accepted(one_input("FP32", 3), body("FP32", [1, 3], [1, 2.5, -3]))
    assert raw(found.tensors[0]) == np.array([1, 2.5, -3], "<f4").tobytes()


@pytest.mark.parametrize("element", [0, 1, "true", None, 1.0])
def test_a_boolean_must_be_true_or_false(element: Any) -> None:
    refused(one_input("BOOL", 2), body("BOOL", [1, 2], [True, element]))


@pytest.mark.parametrize("element", [0, None, True, {}, 1.5])
def test_an_element_of_text_must_be_a_string(element: Any) -> None:
    refused(one_input("BYTES"), body("BYTES", [2], ["a", element]))


# ---------------------------------------------------------------------- shapes


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]], [[[1], [2], [3]], [[4], [5], [6]]]])
def test_data_may_be_flat_or_nested(data: Any) -> None:
    wanted = np.arange(1, 7, dtype="<f4").tobytes()
    depth = len(np.shape(data))
    dims = [2, 3, 1][: max(depth, 2)]
    assert raw(accepted(one_input("FP32", *dims[1:]), body("FP32", dims, data)).tensors[0]) == wanted


def test_booleans_and_text_may_be_nested_too() -> None:
    found = accepted(one_input("BOOL", 2), body("BOOL", [2, 2], [[True, False], [False, True]]))
    assert raw(found.tensors[0]) == bytes([1, 0, 0, 1])
    found = accepted(one_input("BYTES", 2), body("BYTES", [2, 2], [["a", "b"], ["c", "d"]]))
    assert found.tensors[0] == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL", "BYTES"])
@pytest.mark.parametrize(
    "template",
    [[[0, 1], [2, 3], [4, 5]], [[0, 1, 2], [3, 4]], [[0, 1, 2, 3], [4, 5]], [[0, 1, 2, 3, 4, 5]],
     [[0, [1, 2]], [3, 4, 5]], [0, [1, 2], 3, 4, 5], [[0, 1, 2], 3, 4, 5], [0, 1, 2, [3, 4, 5]],
     [[[0, 1, 2], [3, 4, 5]]]],
)  # fmt: skip
def test_nested_data_of_another_shape_is_refused(datatype: str, template: Any) -> None:
    """Data that began flat and nested later was flattened in silence."""

    def filled(part: Any) -> Any:
        if isinstance(part, list):
            return [filled(inner) for inner in part]
        return {"FP32": float(part), "INT64": part, "BOOL": bool(part % 2), "BYTES": str(part)}[datatype]

    refused(one_input(datatype, 3), body(datatype, [2, 3], filled(template)))


@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL", "BYTES"])
def test_a_vector_may_not_be_nested(datatype: str) -> None:
    element: Any = {"FP32": 1.5, "INT64": 1, "BOOL": True, "BYTES": "a"}[datatype]
    for data in ([[element, element]], [[element], [element]]):
        refused(one_input(datatype), body(datatype, [2], data))


@pytest.mark.parametrize("data", [[], [1], [1, 2, 3], 5, "12", {}, None])
def test_data_that_does_not_fill_its_shape_is_refused(data: Any) -> None:
    refused(one_input("FP32", 2), body("FP32", [1, 2], data))


@pytest.mark.parametrize(
    "shape",
    [[2], [1, 3], [1, 2, 1], [0, 2], [-1, 2], [1, -2], [1.0, 2], ["1", 2], [True, 2], [None, 2], [], 5, None, "1,2",
     [[1, 2]], [2**31, 2], [2**40, 2], {}],
)  # fmt: skip
def test_a_shape_that_the_model_does_not_take_is_refused(shape: Any) -> None:
    refused(one_input("FP32", 2), body("FP32", shape, [1, 2]))


@pytest.mark.parametrize("shape", [[2], [1, 3], [1, 2, 1], [0, 2], [-1, 2], [2**31, 2], [2**62, 2**62], []])
def test_a_shape_that_the_model_does_not_take_is_refused_in_binary(shape: Any) -> None:
    entry = {"name": "x", "shape": shape, "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    refused(one_input("FP32", 2), *_in_binary([entry], bytes(8)))


def _in_binary(entries: Any, content: bytes) -> tuple[bytes, Any]:
    head = json.dumps({"inputs": entries}).encode()
    headers = [("content-type", b"application/octet-stream"), ("inference-header-content-length", b"%d" % len(head))]
    return head + content, headers


@pytest.mark.parametrize("datatype", ["FP64", "INT32", "fp32", "FLOAT", "", None, 5])
def test_another_datatype_is_refused_with_the_one_that_is_taken(datatype: Any) -> None:
    assert "FP32" in refused(one_input("FP32", 2), body(datatype, [1, 2], [1, 2]))


def test_a_dimension_that_varies_takes_any_size() -> None:
    for size in (1, 2, 50):
        assert accepted(one_input("FP32", -1), body("FP32", [1, size], [0.5] * size)).shapes[0] == (1, size)


# ---------------------------------------------------------------------- several inputs

PAIR = signature([TensorShape("a", "FP32", (-1, 2)), TensorShape("b", "BYTES", (-1,))])


@pytest.mark.parametrize("encoding", ["json", "binary"])
def test_inputs_are_put_in_the_models_order(encoding: Any) -> None:
    value, headers = build_request({"b": ["t"], "a": Tensor([[1.0, 2.0]], "FP32")}, encoding=encoding)
    found = accepted(PAIR, value, headers)
    assert raw(found.tensors[0]) == np.array([1, 2], "<f4").tobytes()
    assert found.tensors[1] == [b"t"]
    assert list(found.shapes) == [(1, 2), (1,)]


def _pair(*entries: Any) -> bytes:
    return json.dumps({"inputs": list(entries)}).encode()


A = {"name": "a", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
B = {"name": "b", "shape": [1], "datatype": "BYTES", "data": ["t"]}


@pytest.mark.parametrize(
    ("entries", "mentions"),
    [([A], "b"), ([B], "a"), ([], "a"), ([A, A, B], "twice"), ([A, B, {**B, "name": "c"}], "'c'"),
     ([A, {**B, "name": None}], "None"), ([A, {**B, "name": 5}], "5"), ([A, {}], "None"),
     ([A, {**B, "shape": [2], "data": ["t", "u"]}], "rows")],
)  # fmt: skip
def test_inputs_that_are_missing_doubled_unknown_or_disagree_are_refused(entries: Any, mentions: str) -> None:
    assert mentions in refused(PAIR, _pair(*entries))


def test_inputs_that_disagree_are_refused_in_binary_too() -> None:
    sized = {"parameters": {"binary_data_size": 8}}
    a = {"name": "a", "shape": [1, 2], "datatype": "FP32", **sized}
    b = {"name": "b", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}
    text = (1).to_bytes(4, "little") + b"t"
    accepted(PAIR, *_in_binary([a, b], bytes(8) + text))
    refused(PAIR, *_in_binary([a], bytes(8)))
    refused(PAIR, *_in_binary([a, a, b], bytes(16) + text))
    refused(PAIR, *_in_binary([a, {**b, "shape": [2]}], bytes(8) + text))


def test_a_binary_request_may_carry_some_inputs_in_its_json_part() -> None:
    a = {"name": "a", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    content = np.array([1, 2], "<f4").tobytes()
    for entries in ([a, B], [B, a]):
        found = accepted(PAIR, *_in_binary(entries, content))
        assert raw(found.tensors[0]) == content
        assert found.tensors[1] == [b"t"]


@pytest.mark.parametrize("data", [None, 5, "x", ["a", "b"], [1], {}, [2**70]])
def test_inline_data_is_checked_like_any_other(data: Any) -> None:
    a = {"name": "a", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    refused(PAIR, *_in_binary([a, {**B, "data": data}], bytes(8)))


def test_an_input_with_neither_data_nor_a_size_is_refused() -> None:
    refused(one_input("FP32", 2), *_in_binary([{"name": "x", "shape": [1, 2], "datatype": "FP32"}], b""))


@pytest.mark.parametrize(
    ("content", "shape"),
    [(b"\x01\0\0", [1]), (b"\x05\0\0\0abc", [1]), (b"\x01\0\0\0a", [2]), (b"\x01\0\0\0a" * 2, [1]), (b"", [1]),
     (b"\xff\xff\xff\xffa", [1])],
)  # fmt: skip
def test_text_with_broken_length_prefixes_is_refused(content: bytes, shape: list[int]) -> None:
    entry = {"name": "x", "shape": shape, "datatype": "BYTES", "parameters": {"binary_data_size": len(content)}}
    refused(one_input("BYTES"), *_in_binary([entry], content))


# ---------------------------------------------------------------------- lanes


def _lane(model: Signature, *shape: int) -> Any:
    return accepted(model, body("FP32", list(shape), [0.5] * int(np.prod(shape)))).lane


def test_requests_of_other_shapes_have_other_lanes_unless_the_tensor_may_be_padded() -> None:
    fixed = one_input("FP32", -1)
    assert _lane(fixed, 1, 2) == _lane(fixed, 3, 2) != _lane(fixed, 1, 3)
    padded = one_input("FP32", -1, pad=0)
    assert _lane(padded, 1, 2) == _lane(padded, 1, 3)
    half = one_input("FP32", -1, 2, pad=0)
    assert _lane(half, 1, 3, 2) == _lane(half, 1, 5, 2)


def test_requests_that_are_prepared_share_one_lane() -> None:
    model = signature([TensorShape("x", "FP32", (-1, -1))], prepares=True)
    assert _lane(model, 1, 2) == _lane(model, 1, 9)


def test_two_models_never_share_a_lane() -> None:
    models = [signature(model="a"), signature(model="b")]
    using = Decoder(models, Limits())
    value, headers = build_request({"x": Tensor([[0.0] * 4], "FP32")})
    lanes = []
    for name in (b"a", b"b"):
        found = using.decode(record(value, [*headers, ("model", name)]), NOW, NOW_MS)
        assert isinstance(found, Request)
        lanes.append(found.lane)
    assert lanes[0] != lanes[1]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=8))
def test_any_elements_of_bytes_survive_the_binary_encoding(parts: list[bytes]) -> None:
    value, headers = build_request({"x": parts})
    assert accepted(one_input("BYTES"), value, headers).tensors[0] == parts


@given(st.lists(st.text(max_size=10), min_size=1, max_size=8))
def test_any_text_survives_json(parts: list[str]) -> None:
    value, headers = build_request({"x": parts}, encoding="json")
    assert accepted(one_input("BYTES"), value, headers).tensors[0] == [part.encode() for part in parts]
