"""The wire models of Forebay: what a producer writes, what a consumer reads. Needs pydantic alone.

A request and a result are Open Inference Protocol v2 documents; the headers beside them are Kafka record
headers. These models serve producers, tests, documents and tools; the worker's hot path decodes by itself.
"""

from __future__ import annotations

from forebay_schemas import headers
from forebay_schemas.codes import RETRIABLE_CODES, ErrorCode
from forebay_schemas.failure import DeadLetterHeaders, ErrorResult
from forebay_schemas.headers import RequestHeaders, ResultHeaders
from forebay_schemas.request import InferenceRequest, RequestedOutput, RequestInput
from forebay_schemas.result import InferenceResult, ResultOutput
from forebay_schemas.tensor import DATATYPE_BYTES, Datatype, TensorElements

__all__ = [
    "DATATYPE_BYTES",
    "RETRIABLE_CODES",
    "Datatype",
    "DeadLetterHeaders",
    "ErrorCode",
    "ErrorResult",
    "InferenceRequest",
    "InferenceResult",
    "RequestHeaders",
    "RequestInput",
    "RequestedOutput",
    "ResultHeaders",
    "ResultOutput",
    "TensorElements",
    "headers",
]
