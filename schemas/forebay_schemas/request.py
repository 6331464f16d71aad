"""The inference request: the value of a record on an input topic."""

from __future__ import annotations

from pydantic import Field, model_validator

from forebay_schemas.tensor import Parameters, Tensor, WireModel

MAX_ID_BYTES = 256
"""Longest request id, in UTF-8 bytes."""


class RequestInput(Tensor):
    """One input tensor. Its first dimension is the request's rows, equal for all inputs of the request."""


class RequestedOutput(WireModel):
    """An output that the requester wants; a request that names none gets all."""

    name: str = Field(min_length=1)
    parameters: Parameters | None = None


class InferenceRequest(WireModel):
    """An Open Inference Protocol v2 inference request.

    With the header `content-type: application/octet-stream` this JSON is followed by the raw tensors, and the
    header `inference-header-content-length` says how many bytes of the value are JSON.
    """

    id: str | None = Field(
        default=None,
        description="The request id; the header `x-request-id` precedes it. At most 256 bytes of UTF-8.",
    )
    parameters: Parameters | None = Field(
        default=None, description="`timeout` (microseconds) and `priority` (1 is highest) mean something to Forebay."
    )
    inputs: list[RequestInput] = Field(min_length=1)
    outputs: list[RequestedOutput] | None = None

    @model_validator(mode="after")
    def _inputs_agree(self) -> InferenceRequest:
        if self.id is not None and len(self.id.encode()) > MAX_ID_BYTES:
            raise ValueError(f"id is longer than {MAX_ID_BYTES} bytes")
        names = [tensor.name for tensor in self.inputs]
        if len(set(names)) != len(names):
            raise ValueError("two inputs have the same name")
        rows = {tensor.shape[0] for tensor in self.inputs}
        if len(rows) > 1:
            raise ValueError(f"inputs differ in rows, their first dimension: {sorted(rows)}")
        return self

    @property
    def rows(self) -> int:
        """The rows of the request; its result has as many."""
        return self.inputs[0].shape[0]
