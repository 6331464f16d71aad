"""Result values: the rows of a batch's outputs in either encoding, as a reader that shares no line with it sees."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import RequestError
from forebay.records import Code, Encoding, Headers, Output, TensorShape
from forebay.stream.rows import Rows
from forebay.wire import Result, parse_result, text_header
from forebay.wire.tensors import to_bfloat16
from tests.unit.builders import request, signature

BOTH = pytest.mark.parametrize("encoding", list(Encoding))
DTYPES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip


def rows_of(*outputs: tuple[str, Output], batch_size: int = 4) -> Rows:
    specs = [TensorShape(f"o{index}", datatype, (-1, *out.dims)) for index, (datatype, out) in enumerate(outputs)]
    model = signature(outputs=specs, model="model", version="3")
    return Rows(model, [output for _, output in outputs], batch_size)


def read(rows: Rows, start: int, end: int, encoding: Encoding, **options: Any) -> Result:
    value, headers = rows.encode(request("the id", rows=end - start, encoding=encoding, **options), start, end)
    return parse_result(value, headers)


def numbers(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    flat = np.arange(int(np.prod(shape)))
    return (flat % 2 if dtype == "?" else flat).astype(dtype).reshape(shape)


@BOTH
@pytest.mark.parametrize("datatype", DTYPES)
def test_every_datatype_comes_back_row_by_row(datatype: str, encoding: Encoding) -> None:
    array = numbers(DTYPES[datatype], 4, 2, 3)
    rows = rows_of((datatype, Output((2, 3), array.tobytes())))
    for start, end in ((0, 1), (1, 3), (3, 4)):
        found = read(rows, start, end, encoding)["o0"]
        assert isinstance(found, np.ndarray)
        assert found.shape == (end - start, 2, 3)
        assert np.array_equal(found, array[start:end])


@BOTH
def test_bfloat16_comes_back_as_fp32_in_json_and_as_itself_in_binary(encoding: Encoding) -> None:
    exact = np.array([[1.5], [-2.0], [0.0], [3.0e38]], "<f4")
    rows = rows_of(("BF16", Output((1,), to_bfloat16(exact).tobytes())))
    value, headers = rows.encode(request(encoding=encoding), 1, 2)
    found = parse_result(value, headers)["o0"]
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [[-2.0]]
    head = value if encoding is Encoding.JSON else value[: int(text_header(headers, LENGTH) or 0)]
    assert json.loads(head)["outputs"][0]["datatype"] == ("FP32" if encoding is Encoding.JSON else "BF16")


LENGTH = "inference-header-content-length"


def test_16_bit_floats_are_called_fp32_in_json() -> None:
    rows = rows_of(("FP16", Output((1,), np.array([[0.1]], "<f2").tobytes())))
    output = json.loads(rows.encode(request(encoding=Encoding.JSON), 0, 1)[0])["outputs"][0]
    assert output["datatype"] == "FP32"
    assert output["data"] == [pytest.approx(0.1, rel=1e-3)]


@BOTH
def test_text_comes_back_row_by_row(encoding: Encoding) -> None:
    parts = [b"a", "ü".encode(), b"", b"ddd"]
    rows = rows_of(("BYTES", Output((), parts)))
    assert read(rows, 1, 3, encoding)["o0"] == parts[1:3]


def test_bytes_that_are_no_text_come_back_in_binary_and_are_refused_in_json() -> None:
    rows = rows_of(("BYTES", Output((), [b"fine", b"\xff"])))
    assert read(rows, 1, 2, Encoding.BINARY)["o0"] == [b"\xff"]
    assert read(rows, 0, 1, Encoding.JSON)["o0"] == [b"fine"]
    with pytest.raises(RequestError, match="o0") as raised:
        rows.encode(request(encoding=Encoding.JSON), 1, 2)
    assert raised.value.code is Code.UNSUPPORTED_TYPE


@BOTH
def test_only_the_wanted_outputs_come_back_in_the_order_asked_for(encoding: Encoding) -> None:
    rows = rows_of(
        ("FP32", Output((1,), numbers("<f4", 4, 1).tobytes())),
        ("BYTES", Output((), [b"a", b"b", b"c", b"d"])),
        ("INT64", Output((), numbers("<i8", 4).tobytes())),
    )
    found = read(rows, 2, 3, encoding, wanted=(2, 0))
    assert list(found.outputs) == ["o2", "o0"]
    assert np.array_equal(found["o2"], [2])
    assert list(read(rows, 2, 3, encoding).outputs) == ["o0", "o1", "o2"]
    assert read(rows, 2, 3, encoding, wanted=(1,))["o1"] == [b"c"]


@BOTH
def test_a_result_names_its_model_version_and_id(encoding: Encoding) -> None:
    value, headers = rows_of(("FP32", Output((1,), bytes(16)))).encode(request('a"ü\n', encoding=encoding), 0, 1)
    found = parse_result(value, headers)
    assert (found.model, found.version, found.id) == ("model", "3", 'a"ü\n')


@BOTH
def test_a_result_has_the_headers_of_the_contract(encoding: Encoding) -> None:
    rows = rows_of(("FP32", Output((1,), bytes(16))), batch_size=4)
    _, headers = rows.encode(request(encoding=encoding), 0, 1)
    found = dict(headers)
    length = found.pop(LENGTH, None)
    assert (length is None) is (encoding is Encoding.JSON)
    assert found == {
        "status": b"ok",
        "model": b"model",
        "model-version": b"3",
        "batch-size": b"4",
        "content-type": encoding.value.encode(),
    }


@BOTH
def test_headers_are_a_list_of_their_own_for_every_result(encoding: Encoding) -> None:
    rows = rows_of(("FP32", Output((1,), bytes(16))))
    first: Headers = rows.encode(request(encoding=encoding), 0, 1)[1]
    first.append(("leak", b"1"))
    assert "leak" not in dict(rows.encode(request(encoding=encoding), 1, 2)[1])


@BOTH
@given(
    sizes=st.lists(st.tuples(st.integers(1, 3), st.sampled_from([None, (0,), (1,), (1, 0)])), min_size=1, max_size=6)
)
def test_any_split_of_a_batch_gives_every_request_its_own_rows(encoding: Encoding, sizes: list[Any]) -> None:
    total = sum(rows for rows, _ in sizes)
    array, texts = numbers("<i4", total, 2), [b"%d" % number for number in range(total)]
    rows = rows_of(("INT32", Output((2,), array.tobytes())), ("BYTES", Output((), texts)), batch_size=total)
    start = 0
    for count, wanted in sizes:
        found = read(rows, start, start + count, encoding, wanted=wanted).outputs
        assert sorted(found) == [f"o{index}" for index in sorted(wanted or (0, 1))]
        if "o0" in found:
            assert np.array_equal(found["o0"], array[start : start + count])
        if "o1" in found:
            assert found["o1"] == texts[start : start + count]
        start += count
