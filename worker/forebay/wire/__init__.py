"""Requests and results of the Open Inference Protocol on the caller's side, for producers, tools, tests and bench.

`build_request` and `parse_result` are what a producer and a consumer need; `parse_request`, `build_result` and
`build_error` are the other half, for doubles of a worker. Needs numpy and no Kafka.
"""

from __future__ import annotations

from forebay.wire.codec import build_error, build_request, build_result, parse_outcome, parse_request, parse_result
from forebay.wire.tensors import Tensor, WireError
from forebay.wire.values import (
    InferenceError,
    Inputs,
    ParsedRequest,
    RequestOptions,
    Result,
    WireEncoding,
    text_header,
)

__all__ = [
    "InferenceError",
    "Inputs",
    "ParsedRequest",
    "RequestOptions",
    "Result",
    "Tensor",
    "WireEncoding",
    "WireError",
    "build_error",
    "build_request",
    "build_result",
    "parse_outcome",
    "parse_request",
    "parse_result",
    "text_header",
]
