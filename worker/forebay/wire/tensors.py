"""Tensors between numpy and the Open Inference Protocol, on the caller's side: client, command line, tests, bench.

Needs numpy and no Kafka. The worker decodes by its own faster code in `stream`; two implementations that never
share a line are what lets a test trust either.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.errors import UsageError

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
"""How each datatype lies in memory; BF16 as its bits."""
BINARY_ONLY = frozenset({"FP16", "BF16"})
DATATYPES = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}

Array = npt.NDArray[Any]


class WireError(UsageError, ValueError):
    """A tensor, request or result that cannot be put on the wire or read from it. Nothing was sent."""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """An input that says its datatype or shape itself: `Tensor(array, "BF16")`, `Tensor([b"a"], shape=(1, 1))`.

    `values` is anything numpy reads, or a list of bytes or str, which is BYTES. BF16 takes floats, rounded to
    nearest even, or uint16 bits.
    """

    values: Any
    datatype: str | None = None
    shape: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A tensor ready for either encoding: an array of the datatype's memory layout, or the elements of BYTES."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: Array | list[bytes]


def pack(name: str, values: Any) -> Packed:
    """Pack one tensor.

    Without a `Tensor` around it an array keeps its dtype; lists of numbers become what torch makes of them: FP32,
    INT64 or BOOL; bytes and str become BYTES. Raises WireError in one sentence.
    """
    tensor = values if isinstance(values, Tensor) else Tensor(values)
    if tensor.datatype is not None and tensor.datatype not in DTYPES and tensor.datatype != "BYTES":
        raise WireError(f"{name}: unknown datatype {tensor.datatype!r}; one of {', '.join(DTYPES)}, BYTES")
    if tensor.datatype == "BYTES" or (tensor.datatype is None and _is_text(tensor.values)):
        elements, shape = _elements(name, tensor.values)
        return Packed(name, "BYTES", _shape(name, tensor.shape, shape, len(elements)), elements)
    array, datatype = _numeric(name, tensor)
    return Packed(name, datatype, _shape(name, tensor.shape, array.shape, array.size), array)


def _is_text(values: Any) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind in "SUO"
    while isinstance(values, list | tuple) and values:
        values = values[0]
    return isinstance(values, bytes | str | bytearray | memoryview)


def _elements(name: str, values: Any) -> tuple[list[bytes], tuple[int, ...]]:
    if isinstance(values, bytes | str | bytearray | memoryview):
        raise WireError(f"{name}: BYTES takes a list, one element per row, not a lone {type(values).__name__}")
    array = np.empty(0, dtype=object) if not len(values) else np.asarray(values, dtype=object)
    elements = []
    for element in array.ravel().tolist():
        if isinstance(element, str):
            elements.append(element.encode())
        elif isinstance(element, bytes | bytearray | memoryview):
            elements.append(bytes(element))
        else:
            raise WireError(f"{name}: BYTES takes bytes or str, not {type(element).__name__}")
    return elements, array.shape


def _numeric(name: str, tensor: Tensor) -> tuple[Array, str]:
    from_lists = not isinstance(tensor.values, np.ndarray | np.generic)
    try:
        array = np.asarray(tensor.values)
    except ValueError as error:
        raise WireError(f"{name}: the rows differ in length; pad them or send one request each") from error
    if from_lists and array.dtype.kind == "f" and DTYPES.get(tensor.datatype or "", array.dtype).kind in "iu":
        array = _whole_numbers(name, tensor.values, tensor.datatype or "")
    if array.dtype.kind == "O":
        kind = type(tensor.values).__name__
        raise WireError(f"{name}: a tensor is an array, or a list of numbers, bytes or str; this {kind} holds others")
    if array.dtype.kind not in "biuf":
        raise WireError(f"{name}: {array.dtype} is no datatype of the protocol; one of {', '.join(DTYPES)}, BYTES")
    wanted = tensor.datatype
    if wanted is None:
        if from_lists and array.dtype.kind == "f":
            array = array.astype(np.float32)
        wanted = DATATYPES.get(array.dtype.newbyteorder("<") if array.dtype.itemsize > 1 else array.dtype)
        if wanted is None:
            raise WireError(f"{name}: {array.dtype} is no datatype of the protocol; convert it, for example to float32")
    if wanted == "BF16":
        return (array if array.dtype == np.uint16 else to_bfloat16(array)), wanted
    return np.ascontiguousarray(_cast(name, array, wanted)).reshape(array.shape), wanted


def _whole_numbers(name: str, values: Any, datatype: str) -> Array:
    """Read a list of whole numbers that numpy makes floats of, which rounds above 2**53: [2**63, 0]."""
    exact = np.asarray(values, dtype=object)
    try:
        array = exact.astype(DTYPES[datatype])
    except (OverflowError, ValueError) as error:
        raise WireError(f"{name}: values do not fit {datatype}") from error
    if not np.array_equal(array.astype(object), exact):
        raise WireError(f"{name}: values do not fit {datatype}")
    return array


def _cast(name: str, array: Array, datatype: str) -> Array:
    """Convert to the datatype's layout; refuse a conversion that changes whole numbers."""
    target = DTYPES[datatype]
    if array.dtype == target:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(target)
    if target.kind in "iub" and not np.array_equal(cast, array):
        raise WireError(f"{name}: values do not fit {datatype}")
    return cast


def _shape(name: str, wanted: Sequence[int] | None, found: tuple[int, ...], elements: int) -> tuple[int, ...]:
    shape = tuple(int(size) for size in (found if wanted is None else wanted))
    if not shape:
        raise WireError(f"{name}: a scalar has no rows; give it a first dimension, for example [value]")
    if prod(shape) != elements:
        raise WireError(f"{name}: shape {list(shape)} takes {prod(shape)} elements, not {elements}")
    return shape


def to_bfloat16(array: Array) -> npt.NDArray[np.uint16]:
    """Round floats to bfloat16 bits, to nearest even; NaN stays NaN."""
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(array, dtype="<f4").view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x0040
    is_nan = (bits & 0x7FFF_FFFF) > 0x7F80_0000
    return np.where(is_nan, quiet, rounded).astype("<u2").reshape(np.shape(array))


def from_bfloat16(bits: Array) -> npt.NDArray[np.float32]:
    """Widen bfloat16 bits to float32; exact."""
    return (bits.astype("<u4") << 16).view("<f4")


def to_bytes(packed: Packed) -> bytes:
    """Give the raw little-endian bytes of the binary encoding."""
    if isinstance(packed.content, list):
        return b"".join(struct.pack("<I", len(element)) + element for element in packed.content)
    return packed.content.tobytes()


def to_json_elements(packed: Packed) -> Array | list[str]:
    """Give the flat elements for JSON. Raises WireError where JSON cannot carry them."""
    if packed.datatype in BINARY_ONLY:
        raise WireError(f"{packed.name}: {packed.datatype} travels in the binary encoding only")
    if isinstance(packed.content, list):
        try:
            return [element.decode() for element in packed.content]
        except UnicodeDecodeError as error:
            raise WireError(f"{packed.name}: bytes that are not UTF-8 travel in the binary encoding only") from error
    if packed.content.dtype.kind == "f" and not np.isfinite(packed.content).all():
        raise WireError(f"{packed.name}: NaN and Infinity travel in the binary encoding only")
    return packed.content.ravel()


def unpack(packed: Packed) -> Array | list[bytes]:
    """Give what the caller gets: an array of the shape, BF16 widened to float32; BYTES as a flat list."""
    if isinstance(packed.content, list):
        return packed.content
    array = packed.content.reshape(packed.shape)
    return from_bfloat16(array) if packed.datatype == "BF16" else array


def from_bytes(name: str, datatype: str, shape: tuple[int, ...], raw: memoryview) -> Packed:
    """Read a tensor of the binary encoding. The array shares the memory of `raw` and is read-only."""
    if datatype == "BYTES":
        elements = _split_elements(name, raw)
        return Packed(name, datatype, _shape(name, shape, (), len(elements)), elements)
    if datatype not in DTYPES:
        raise WireError(f"{name}: unknown datatype {datatype!r}")
    if len(raw) != prod(shape) * DTYPES[datatype].itemsize:
        raise WireError(f"{name}: {datatype} of shape {list(shape)} does not take {len(raw)} bytes")
    return Packed(name, datatype, shape, np.frombuffer(raw, DTYPES[datatype]).reshape(shape))


def from_json_elements(name: str, datatype: str, shape: tuple[int, ...], elements: Any) -> Packed:
    """Read a tensor of JSON, flat or nested."""
    if datatype not in DTYPES and datatype != "BYTES":
        raise WireError(f"{name}: unknown datatype {datatype!r}")
    if datatype in BINARY_ONLY:
        raise WireError(f"{name}: {datatype} travels in the binary encoding only")
    return pack(name, Tensor(elements, datatype, shape))


def _split_elements(name: str, raw: memoryview) -> list[bytes]:
    elements, position = [], 0
    while position < len(raw):
        start = position + 4
        length = int.from_bytes(raw[position:start], "little")
        position = start + length
        if position > len(raw):
            raise WireError(f"{name}: a BYTES element ends behind its tensor")
        elements.append(bytes(raw[start:position]))
    return elements
