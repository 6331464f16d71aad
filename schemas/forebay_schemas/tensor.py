"""What request and result share: datatypes, elements, and the rules that tie shape, datatype and content together."""

from __future__ import annotations

from enum import StrEnum
from math import prod
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import TypeAliasType

Dimension = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
ParameterValue = bool | int | Number | str
Parameters = dict[str, ParameterValue]
TensorElements = TypeAliasType("TensorElements", "list[bool | int | Number | str | TensorElements]")
"""The elements of a tensor in JSON, row-major: flat, or nested as the shape is."""


class Datatype(StrEnum):
    """The Open Inference Protocol's datatypes, and BF16."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    BF16 = "BF16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"


DATATYPE_BYTES = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
    "BYTES": 0,
}
"""Bytes of one element; BYTES elements vary."""

BINARY_ONLY = frozenset({Datatype.FP16, Datatype.BF16})
"""Datatypes that travel in the binary encoding only."""


class WireModel(BaseModel):
    """The base of every model here: frozen, and tolerant of keys that a later version may add."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, use_enum_values=False)


class Tensor(WireModel):
    """A named tensor, either in JSON (`data`) or as bytes behind the JSON (`parameters.binary_data_size`)."""

    name: str = Field(min_length=1, description="The tensor's name as the model declares it.")
    shape: list[Dimension] = Field(min_length=1, description="Dimensions; the first is the request's rows.")
    datatype: Datatype
    parameters: Parameters | None = Field(
        default=None, description="`binary_data_size`: bytes of this tensor behind the JSON."
    )
    data: TensorElements | None = Field(
        default=None, description="The elements, row-major, flat or nested; absent if they travel as bytes."
    )

    @property
    def elements(self) -> int:
        """The number of elements that the shape asks for."""
        return prod(self.shape)

    @property
    def binary_data_size(self) -> int | None:
        """Bytes of this tensor behind the JSON, None if it is in the JSON."""
        size = (self.parameters or {}).get("binary_data_size")
        return size if isinstance(size, int) and not isinstance(size, bool) else None

    @model_validator(mode="after")
    def _content_fits(self) -> Tensor:
        size = self.binary_data_size
        if (self.data is None) == (size is None):
            raise ValueError(f"tensor {self.name!r} needs either data or parameters.binary_data_size")
        if size is not None:
            width = DATATYPE_BYTES[self.datatype]
            if size < 0 or (width and size != width * self.elements):
                raise ValueError(
                    f"tensor {self.name!r}: {self.datatype} of shape {self.shape} takes "
                    f"{width * self.elements} bytes, not {size}"
                )
            return self
        if self.datatype in BINARY_ONLY:
            raise ValueError(f"tensor {self.name!r}: {self.datatype} travels in the binary encoding only")
        found = _count(self.data)
        if found != self.elements:
            raise ValueError(f"tensor {self.name!r}: shape {self.shape} takes {self.elements} elements, not {found}")
        return self


def _count(elements: Any) -> int:
    """Count the leaves of nested lists without recursion, so that deep nesting cannot exhaust the stack."""
    found, waiting = 0, [elements]
    while waiting:
        for element in waiting.pop():
            if isinstance(element, list):
                waiting.append(element)
            else:
                found += 1
    return found
