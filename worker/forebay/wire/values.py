"""The values of the caller's side: what a request may say, the result, the error result, a request as parsed.

Needs numpy and no Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from forebay.errors import ForebayError
from forebay.records import Headers
from forebay.wire.tensors import Array, Packed, unpack
from forebay_schemas import headers as names

Inputs = Mapping[str, Any]
"""Tensors by name: numpy arrays, lists of numbers, lists of bytes or str, or `Tensor`."""
WireEncoding = Literal["binary", "json"]


class RequestOptions(TypedDict, total=False):
    """What a request may say beside its inputs.

    `timeout_ms` counts from the record's timestamp; priority 1 is highest.
    """

    id: str
    model: str
    version: str
    outputs: Sequence[str]
    parameters: Mapping[str, str | int | float | bool]
    timeout_ms: int
    priority: int
    headers: Sequence[tuple[str, bytes | None]]


SHOWN_ELEMENTS, SHOWN_BYTES = 6, 40
"""What the repr of a result shows of a tensor, and of an element of bytes."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Result:
    """A result: `outputs` by name are arrays (BF16 widened to float32) or, for BYTES, lists of bytes."""

    id: str
    outputs: dict[str, Array | list[bytes]]
    model: str = ""
    version: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    headers: Headers = field(default_factory=list)

    def __repr__(self) -> str:
        outputs = ", ".join(f"{name!r}: {_shortened(values)}" for name, values in self.outputs.items())
        told = f"id={self.id!r}, model={self.model!r}, version={self.version!r}, batch_size={self.batch_size}"
        return f"Result({told}, source={self.source!r}, outputs={{{outputs}}})"

    def __getitem__(self, name: str) -> Array | list[bytes]:
        if name not in self.outputs:
            raise KeyError(f"no output {name!r}; there is {', '.join(self.outputs)}")
        return self.outputs[name]

    @property
    def source(self) -> str | None:
        """TOPIC/PARTITION/OFFSET of the request record; equal in duplicates of one result."""
        return text_header(self.headers, names.SOURCE)

    @property
    def batch_size(self) -> int | None:
        """Rows of the batch that ran the request."""
        size = text_header(self.headers, names.BATCH_SIZE)
        return int(size) if size and size.isdigit() else None


class InferenceError(ForebayError):
    """The worker answered a request with an error result. `retriable` says whether sending it again may help."""

    exit_code = 1

    def __init__(self, id: str, code: str, message: str, retriable: bool, headers: Headers | None = None) -> None:
        super().__init__(f"{code}: {message} (request {id})")
        self.id = id
        self.code = code
        self.message = message
        self.retriable = retriable
        self.headers: Headers = headers or []

    @property
    def source(self) -> str | None:
        """TOPIC/PARTITION/OFFSET of the request record."""
        return text_header(self.headers, names.SOURCE)


@dataclass(frozen=True, slots=True, eq=False)
class ParsedRequest:
    """A request as it was on the wire. `wanted` names the outputs asked for, None for all."""

    id: str | None
    tensors: dict[str, Packed]
    encoding: WireEncoding
    parameters: Mapping[str, Any]
    wanted: list[str] | None

    @property
    def inputs(self) -> dict[str, Array | list[bytes]]:
        """The inputs as arrays and lists of bytes."""
        return {name: unpack(tensor) for name, tensor in self.tensors.items()}


def _shortened(values: Array | list[bytes]) -> str:
    """Show a tensor in a line: its type, its shape and its first elements, or its first element of bytes."""
    if isinstance(values, list):
        first = "".join(repr(one[:SHOWN_BYTES]) + "…" * (len(one) > SHOWN_BYTES) for one in values[:1])
        return f"[{first}]" if len(values) < 2 else f"[{first}, … {len(values):,} elements]"
    shown = " ".join(f"{one:.4g}" if values.dtype.kind == "f" else str(one) for one in values.flat[:SHOWN_ELEMENTS])
    return f"{values.dtype}{list(values.shape)} {shown}{' …' * (values.size > SHOWN_ELEMENTS)}".rstrip()


def text_header(headers: Headers, name: str) -> str | None:
    """Give the first header of that name as text, None if it is absent."""
    for key, value in headers:
        if key == name and value is not None:
            return value.decode("utf-8", "replace")
    return None
