"""The error codes of an error result: a stable list that a consumer may match on."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request has no result."""

    INVALID_PAYLOAD = "invalid_payload"
    INVALID_TENSOR = "invalid_tensor"
    TOO_LARGE = "too_large"
    UNSUPPORTED_TYPE = "unsupported_type"
    UNKNOWN_MODEL = "unknown_model"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    REPLY_NOT_ALLOWED = "reply_not_allowed"
    MODEL_ERROR = "model_error"
    NON_FINITE_OUTPUT = "non_finite_output"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    RESULT_TOO_LARGE = "result_too_large"
    POISONED = "poisoned"
    INTERNAL = "internal"


RETRIABLE_CODES = frozenset({ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.INTERNAL, ErrorCode.DEADLINE_EXCEEDED})
"""Codes where the same request may succeed if it is sent again."""
