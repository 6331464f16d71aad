"""The inference result: the value of a record on the output topic whose header `status` is `ok`."""

from __future__ import annotations

from pydantic import Field

from forebay_schemas.tensor import Parameters, Tensor, WireModel


class ResultOutput(Tensor):
    """One output tensor; its first dimension is the request's rows."""


class InferenceResult(WireModel):
    """An Open Inference Protocol v2 inference response, in the encoding of its request."""

    model_name: str
    model_version: str | None = None
    id: str = Field(description="The request id, which is also the record's key.")
    parameters: Parameters | None = None
    outputs: list[ResultOutput]
