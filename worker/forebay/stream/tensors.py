"""Tensors on the wire: checking them against a model's signature and turning them into plain buffers.

Every refusal names the input and says what was expected. No element of a numeric tensor is ever touched by Python.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import simdjson

from forebay.errors import RequestError
from forebay.records import Code, Signature, TensorShape, lane_of
from forebay.stream.json_data import from_json, refuse

ITEM_BYTES = {
    "BOOL": 1,
    "UINT8": 1,
    "INT8": 1,
    "UINT16": 2,
    "INT16": 2,
    "FP16": 2,
    "BF16": 2,
    "UINT32": 4,
    "INT32": 4,
    "FP32": 4,
    "UINT64": 8,
    "INT64": 8,
    "FP64": 8,
}
"""Bytes of one element; BYTES is not among them."""

_MAX_ELEMENTS = 1 << 31


class HeadInput(msgspec.Struct):
    """An input in the JSON part of a binary request."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: msgspec.Raw = msgspec.Raw()


class Head(msgspec.Struct):
    """The JSON part of a binary request."""

    inputs: list[HeadInput]
    id: Any = None
    parameters: dict[str, Any] | None = None
    outputs: list[Any] | None = None


_read_head = msgspec.json.Decoder(Head).decode


def read_head(head: bytes) -> Head:
    """Parse the JSON part of a binary request."""
    try:
        return _read_head(head)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(Code.INVALID_PAYLOAD, f"the JSON part of the request is not valid: {error}") from None


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows, shapes and lane of a request; `item_bytes` is -1 where only the content tells."""

    rows: int
    shapes: tuple[tuple[int, ...], ...]
    lane: Hashable
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where an input lies in a binary request: at `start` after the JSON part, or already read from JSON."""

    start: int
    end: int
    elements: int
    is_bytes: bool
    content: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether it is a slice of the value as it stands."""
        return self.content is None and not self.is_bytes


class Shape:
    """The inputs and outputs of one model, ready to check requests against."""

    def __init__(self, signature: Signature) -> None:
        self._inputs = signature.inputs
        self._index = {spec.name: index for index, spec in enumerate(signature.inputs)}
        self._outputs = {spec.name: index for index, spec in enumerate(signature.outputs)}
        self.model = signature.model
        self._prepares = signature.prepares
        self._layouts: dict[tuple[tuple[int, ...], ...], Layout] = {}
        self._has_bytes = any(spec.datatype == "BYTES" for spec in signature.inputs)

    def from_json(self, inputs: Sequence[Any]) -> tuple[Layout, list[Any]]:
        """Check and convert the inputs of a JSON request (a simdjson array)."""
        shapes: list[tuple[int, ...]] = [()] * len(self._inputs)
        content: list[Any] = [None] * len(self._inputs)
        for entry in inputs:
            if not isinstance(entry, simdjson.Object):
                raise RequestError(Code.INVALID_PAYLOAD, "each input must be an object")
            index = self._place(entry.get("name"), content)
            spec = self._inputs[index]
            shape = entry.get("shape")
            dims: tuple[Any, ...] = tuple(shape.as_list()) if isinstance(shape, simdjson.Array) else ()
            shapes[index] = self._checked(spec, entry.get("datatype"), dims)
            content[index] = from_json(spec, entry.get("data"), dims)
        self._all_there(content)
        return self._layout(tuple(shapes)), content

    def from_head(self, head: Head) -> tuple[tuple[Tensor, ...], Layout]:
        """Check the inputs of a binary request and say where each lies."""
        shapes: list[tuple[int, ...]] = [()] * len(self._inputs)
        parts: list[Any] = [None] * len(self._inputs)
        position = 0
        for entry in head.inputs:
            index = self._place(entry.name, parts)
            spec = self._inputs[index]
            dims = shapes[index] = self._checked(spec, entry.datatype, tuple(entry.shape))
            size = (entry.parameters or {}).get("binary_data_size")
            if size is None:
                parts[index] = self._inline(spec, entry, dims)
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                refuse(spec, "binary_data_size must be a whole number of bytes")
            elements = prod(dims)
            if spec.datatype != "BYTES" and size != elements * ITEM_BYTES[spec.datatype]:
                refuse(
                    spec,
                    f"shape {list(dims)} of {spec.datatype} has {elements * ITEM_BYTES[spec.datatype]} bytes, "
                    f"binary_data_size says {size}",
                )
            parts[index] = Tensor(position, position + size, elements, spec.datatype == "BYTES")
            position += size
        self._all_there(parts)
        return tuple(parts), self._layout(tuple(shapes))

    def from_binary(self, value: bytes, start: int, parts: tuple[Tensor, ...]) -> list[Any]:
        """Slice the tensors out of a binary request's value; nothing is copied but BYTES elements."""
        end = start
        view = memoryview(value)
        content: list[Any] = []
        for part in parts:
            if part.content is not None:
                content.append(part.content)
                continue
            last = start + part.end
            end = max(end, last)
            raw = view[start + part.start : last]
            content.append(_elements(raw, part.elements) if part.is_bytes else raw)
        if end != len(value):
            raise RequestError(
                Code.INVALID_PAYLOAD,
                f"the tensors take {end - start} bytes after the JSON part, the value has {len(value) - start}",
            )
        return content

    def wanted(self, outputs: Sequence[Any]) -> tuple[int, ...] | None:
        """Return the indices of the outputs that a request names; None for all."""
        found: list[int] = []
        for entry in outputs:
            name = entry.get("name") if isinstance(entry, Mapping) else None
            if not isinstance(name, str) or name not in self._outputs:
                known = ", ".join(self._outputs)
                raise RequestError(Code.INVALID_TENSOR, f"the model has no output {name!r}; it has {known}")
            found.append(self._outputs[name])
        return tuple(dict.fromkeys(found)) or None

    def _inline(self, spec: TensorShape, entry: HeadInput, dims: tuple[int, ...]) -> Tensor:
        """Read an input that travels as JSON inside a binary request."""
        if not bytes(entry.data):
            refuse(spec, "it has neither data nor parameters.binary_data_size")
        try:
            document = simdjson.Parser().parse(bytes(entry.data))
        except (ValueError, RuntimeError):
            refuse(spec, "its data is not valid JSON")
        content = from_json(spec, document, dims)
        return Tensor(0, 0, prod(dims), spec.datatype == "BYTES", content)

    def _place(self, name: object, taken: list[Any]) -> int:
        index = self._index.get(name) if isinstance(name, str) else None
        if index is None:
            known = ", ".join(self._index)
            raise RequestError(Code.INVALID_TENSOR, f"the model has no input {name!r}; it takes {known}")
        if taken[index] is not None:
            raise RequestError(Code.INVALID_TENSOR, f"input {name}: it is given twice")
        return index

    def _all_there(self, content: list[Any]) -> None:
        for spec, found in zip(self._inputs, content, strict=True):
            if found is None:
                raise RequestError(Code.INVALID_TENSOR, f"input {spec.name}: it is missing")

    def _checked(self, spec: TensorShape, datatype: object, dims: tuple[Any, ...]) -> tuple[int, ...]:
        if datatype != spec.datatype:
            refuse(spec, f"the model takes {spec.datatype}, not {datatype}; send it as {spec.datatype}")
        wanted = spec.shape
        if len(dims) != len(wanted):
            refuse(spec, f"the model takes shape {list(wanted)}, not {list(dims)}")
        for dim, want in zip(dims, wanted, strict=True):
            if type(dim) is not int or dim < 1 or (want != -1 and dim != want):
                refuse(spec, f"the model takes shape {list(wanted)}, not {list(dims)}")
        if prod(dims) > _MAX_ELEMENTS:
            refuse(spec, f"shape {list(dims)} is too large")
        return dims

    def _layout(self, shapes: tuple[tuple[int, ...], ...]) -> Layout:
        layout = self._layouts.get(shapes)
        if layout is None:
            rows = shapes[0][0]
            if any(shape[0] != rows for shape in shapes):
                raise RequestError(
                    Code.INVALID_TENSOR, f"the inputs disagree on the rows: {[shape[0] for shape in shapes]}"
                )
            size = 0
            for spec, shape in zip(self._inputs, shapes, strict=True):
                size += prod(shape) * ITEM_BYTES.get(spec.datatype, 0)
            layout = Layout(rows, shapes, self._lane(shapes), -1 if self._has_bytes else size)
            if len(self._layouts) >= 4096:
                self._layouts.clear()
            self._layouts[shapes] = layout
        return layout

    def _lane(self, shapes: tuple[tuple[int, ...], ...]) -> Hashable:
        """A request whose `prepare` has not run has no shape yet, so all of them share a lane."""
        return self.model if self._prepares else lane_of(self.model, self._inputs, shapes)


def size_of(content: Sequence[Any]) -> int:
    """Return the bytes of all tensors of a request, length prefixes of BYTES elements included."""
    return sum(
        sum(map(len, tensor)) + 4 * len(tensor) if isinstance(tensor, list) else len(tensor) for tensor in content
    )


def _elements(raw: memoryview, count: int) -> list[bytes]:
    """Split a BYTES tensor: each element has a 4-byte little-endian length in front."""
    found: list[bytes] = []
    position, end = 0, len(raw)
    while position < end:
        if position + 4 > end:
            raise RequestError(Code.INVALID_TENSOR, "a BYTES tensor ends inside a length prefix")
        length = int.from_bytes(raw[position : position + 4], "little")
        position += 4
        if position + length > end:
            raise RequestError(Code.INVALID_TENSOR, f"a BYTES element of {length} bytes goes past its tensor's end")
        found.append(bytes(raw[position : position + length]))
        position += length
    if len(found) != count:
        raise RequestError(Code.INVALID_TENSOR, f"a BYTES tensor has {len(found)} elements, its shape says {count}")
    return found
