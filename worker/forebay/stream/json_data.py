"""JSON `data` as typed buffers: simdjson writes numbers straight into memory; no element is touched by Python."""

from __future__ import annotations

from math import prod
from typing import Any, NoReturn

import numpy as np
import simdjson

from forebay.errors import RequestError
from forebay.records import Code, TensorShape

_JSON_KINDS: dict[str, tuple[Any, str, str]] = {
    "FP32": ("d", "<f8", "<f4"),
    "FP64": ("d", "<f8", "<f8"),
    **{f"INT{bits}": ("i", "<i8", f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": ("u", "<u8", f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
}
_MOST_COUNTED = 0xFFFFFF
"""simdjson counts the elements of an array no further than this."""


def from_json(spec: TensorShape, found: Any, dims: tuple[int, ...]) -> Any:
    """Convert JSON `data`, flat or nested as the shape says, into a buffer or a list of bytes."""
    if not isinstance(found, simdjson.Array):
        refuse(spec, "it has no list of data")
    count = prod(dims)
    kind = _JSON_KINDS.get(spec.datatype)
    if kind is None:
        return _from_json_list(spec, found, dims, count)
    try:
        values = np.frombuffer(found.as_buffer(of_type=kind[0]), kind[1])
    except (TypeError, ValueError) as error:
        refuse(spec, f"its data has an element that is not {spec.datatype} ({str(error).split(':', 1)[0]})")
    if len(values) != count:
        refuse(spec, f"shape {list(dims)} has {count} elements, data has {len(values)}")
    if len(found) != min(count, _MOST_COUNTED) or isinstance(found[0], simdjson.Array):
        _check_nesting(spec, found.as_list(), dims)
    if kind[1] != kind[2]:
        values = _narrowed(spec, values, kind[2])
    return values.view(np.uint8).data


def _narrowed(spec: TensorShape, values: np.ndarray[Any, Any], target: str) -> np.ndarray[Any, Any]:
    if target[1] == "f":
        try:
            with np.errstate(over="raise"):
                return values.astype(target)
        except FloatingPointError:
            refuse(spec, f"its data has a number beyond {spec.datatype}")
    narrow = values.astype(target)
    if not np.array_equal(narrow, values):
        refuse(spec, f"its data has a number beyond {spec.datatype}")
    return narrow


def _from_json_list(spec: TensorShape, found: Any, dims: tuple[int, ...], count: int) -> Any:
    """Convert BOOL and BYTES, the datatypes that simdjson has no buffer for."""
    if spec.datatype in ("FP16", "BF16"):
        raise RequestError(
            Code.UNSUPPORTED_TYPE, f"input {spec.name}: {spec.datatype} travels in binary only, not in JSON"
        )
    listed = found.as_list()
    flat = listed
    if len(dims) > 1 and listed and isinstance(listed[0], list):
        _check_nesting(spec, listed, dims)
        for _ in dims[1:]:
            flat = [element for part in flat for element in part]
    if len(flat) != count:
        refuse(spec, f"shape {list(dims)} has {count} elements, data has {len(flat)}")
    wanted = bool if spec.datatype == "BOOL" else str
    if not all(type(element) is wanted for element in flat):
        refuse(spec, f"its data has an element that is not {spec.datatype}")
    if wanted is bool:
        return memoryview(bytes(flat))
    return [element.encode() for element in flat]


def _check_nesting(spec: TensorShape, found: list[Any], dims: tuple[int, ...]) -> None:
    if len(found) != dims[0]:
        refuse(spec, f"its nested data does not have the shape {list(dims)}")
    for part in found:
        nested = isinstance(part, list)
        if nested != (len(dims) > 1):
            refuse(spec, f"its nested data does not have the shape {list(dims)}")
        if nested:
            _check_nesting(spec, part, dims[1:])


def refuse(spec: TensorShape, why: str) -> NoReturn:
    raise RequestError(Code.INVALID_TENSOR, f"input {spec.name}: {why}")
