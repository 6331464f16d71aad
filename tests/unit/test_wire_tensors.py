"""Tensors between numpy and the wire: every datatype there and back, and one clear sentence for what cannot travel."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forebay.wire import Tensor, WireError, build_request, parse_request
from forebay.wire.tensors import DTYPES, from_bfloat16, to_bfloat16
from forebay_schemas import InferenceRequest

FEW = settings(max_examples=15, deadline=None)
NUMERIC = [name for name in DTYPES if name != "BF16"]


@pytest.mark.parametrize("datatype", NUMERIC)
@FEW
@given(content=st.data())
def test_every_numeric_datatype_survives_the_binary_encoding(datatype: str, content: st.DataObject) -> None:
    array = content.draw(hnp.arrays(DTYPES[datatype], hnp.array_shapes(max_dims=4, max_side=5)))
    value, headers = build_request({"x": array})
    packed = parse_request(value, headers).tensors["x"]
    assert packed.datatype == datatype
    np.testing.assert_array_equal(packed.content, array)


@pytest.mark.parametrize("datatype", [name for name in NUMERIC if name != "FP16"])
@FEW
@given(content=st.data())
def test_finite_numbers_survive_json(datatype: str, content: st.DataObject) -> None:
    dtype = DTYPES[datatype]
    finite = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else {}
    elements = hnp.from_dtype(dtype, **finite)
    array = content.draw(hnp.arrays(dtype, hnp.array_shapes(max_dims=3, max_side=4), elements=elements))
    value, headers = build_request({"x": array}, encoding="json")
    np.testing.assert_array_equal(parse_request(value, headers).inputs["x"], array)
    assert InferenceRequest.model_validate_json(value).inputs[0].datatype == datatype


@FEW
@given(st.lists(st.binary(max_size=20), min_size=1, max_size=8))
def test_bytes_elements_survive_the_binary_encoding(elements: list[bytes]) -> None:
    value, headers = build_request({"x": elements})
    assert parse_request(value, headers).inputs["x"] == elements


@FEW
@given(st.lists(st.text(max_size=20), min_size=1, max_size=8))
def test_text_survives_both_encodings(elements: list[str]) -> None:
    for encoding in ("binary", "json"):
        value, headers = build_request({"x": elements}, encoding=encoding)
        assert parse_request(value, headers).inputs["x"] == [element.encode() for element in elements]


@FEW
@given(hnp.arrays(np.float32, 16, elements=st.floats(width=32)))
def test_bfloat16_takes_the_nearest_of_its_neighbours_and_even_on_a_tie(array: np.ndarray) -> None:
    bits = to_bfloat16(array)
    exact = array.astype(np.float64)
    for value, found in zip(exact, bits, strict=True):
        if np.isnan(value):
            assert np.isnan(from_bfloat16(np.array([found])))[0]
            continue
        low = int(np.float32(value).view(np.uint32)) >> 16
        candidates = [low, low + 1] if (low & 0x7FFF) < 0x7F80 else [low]
        widened = [float(from_bfloat16(np.array([c], np.uint16))[0]) for c in candidates]
        # Above the largest finite bfloat16 the neighbour is infinity, which stands where 2**128 would.
        places = [np.sign(w) * 2.0**128 if np.isinf(w) and not np.isinf(value) else w for w in widened]
        distances = [0.0 if p == value else abs(p - value) for p in places]
        best = min(distances)
        nearest = [c for c, d in zip(candidates, distances, strict=True) if d == best]
        expected = nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)
        assert int(found) == expected


def test_bfloat16_travels_from_floats_and_from_bits_and_arrives_as_float32() -> None:
    for values in (np.array([[1.0, -2.5]]), np.array([[0x3F80, 0xC020]], np.uint16)):
        value, headers = build_request({"x": Tensor(values, "BF16")})
        arrived = parse_request(value, headers).inputs["x"]
        assert arrived.dtype == np.float32
        assert arrived.tolist() == [[1.0, -2.5]]


def test_whole_numbers_above_what_a_float_holds_stay_exact() -> None:
    value, headers = build_request({"x": Tensor([2**63 + 1, 0], "UINT64")}, encoding="json")
    assert parse_request(value, headers).inputs["x"].tolist() == [2**63 + 1, 0]


def test_lists_become_what_torch_makes_of_them() -> None:
    value, headers = build_request({"f": [[0.5]], "i": [[1]], "b": [[True]], "t": [["a"]]})
    found = {name: tensor.datatype for name, tensor in parse_request(value, headers).tensors.items()}
    assert found == {"f": "FP32", "i": "INT64", "b": "BOOL", "t": "BYTES"}


def test_big_endian_and_strided_arrays_arrive_as_they_read() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2].T
    value, headers = build_request({"x": array})
    np.testing.assert_array_equal(parse_request(value, headers).inputs["x"], array)


def test_a_shape_of_the_callers_own_is_kept() -> None:
    value, headers = build_request({"x": Tensor([b"a", b"b"], shape=(1, 2))})
    assert parse_request(value, headers).tensors["x"].shape == (1, 2)


@pytest.mark.parametrize(
    ("inputs", "encoding", "sentence"),
    [
        ({}, "binary", "at least one input"),
        ({"x": np.array([1j])}, "binary", "x: complex128 is no datatype"),
        ({"x": np.array(3.0)}, "binary", "x: a scalar has no rows"),
        ({"x": [[1.0], [2.0, 3.0]]}, "binary", "x: the rows differ in length"),
        ({"x": "text"}, "binary", "x: BYTES takes a list"),
        ({"x": Tensor([1.0], "FP8")}, "binary", "x: unknown datatype 'FP8'"),
        ({"x": Tensor([1.5], "INT32")}, "binary", "x: values do not fit INT32"),
        ({"x": Tensor([300], "UINT8")}, "binary", "x: values do not fit UINT8"),
        ({"x": Tensor([1, 2], shape=(3,))}, "binary", r"x: shape \[3\] takes 3 elements, not 2"),
        ({"x": [1], "y": [1, 2]}, "binary", "inputs differ in rows, their first dimension: x 1, y 2"),
        ({"x": [float("nan")]}, "json", "x: NaN and Infinity travel in the binary"),
        ({"x": Tensor([1.0], "FP16")}, "json", "x: FP16 travels in the binary"),
        ({"x": Tensor([1.0], "BF16")}, "json", "x: BF16 travels in the binary"),
        ({"x": [b"\xff"]}, "json", "x: bytes that are not UTF-8 travel in the binary"),
    ],
)
def test_what_cannot_travel_is_refused_in_one_sentence(inputs: object, encoding: str, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        build_request(inputs, encoding=encoding)
