"""What `tests.models:Double` must answer, computed again from the bytes of the request, without the worker's codec."""

from __future__ import annotations

import json
import struct
from functools import lru_cache
from typing import Any

from tests.faults.history import Logged, is_error

BROKEN_ROWS = {-1: b"model_error", -2: b"poisoned", -3: b"poisoned", -4: b"poisoned", -5: b"non_finite_output"}
"""What a row's first number makes of a request, by `tests.magic.Magic`; -6 is out of memory."""

Rows = tuple[tuple[int, ...], tuple[float, ...]]
"""The shape of a tensor, and its numbers one after the other."""


def double_answers(request: Logged, outcome: Logged) -> str | None:
    """Say what is wrong with an outcome of a request to `Double`, or None."""
    if outcome.value is None:
        return "it is empty"
    code = outcome.header("error-code")
    rows, expected = _asked(request)
    allowed = {expected}
    if request.header("deadline-ms") or request.header("timeout-ms"):
        allowed.add(b"deadline_exceeded")
    if code not in allowed:
        return f"it is {code or b'ok'!r}, it should be {sorted(one or b'ok' for one in allowed)!r}"
    if is_error(outcome):
        body = json.loads(outcome.value)
        return None if body["code"].encode() == code else f"the body says {body['code']!r}, the header {code!r}"
    if outcome.header("status") != b"ok":
        return f"its status is {outcome.header('status')!r}"
    assert rows is not None
    shape, numbers = rows
    answered = _tensor(outcome.value, outcome.header("inference-header-content-length"), "outputs", "y")
    wanted = shape, tuple([2 * number + 1 for number in numbers])
    return None if answered == wanted else f"it says {answered[1]}, not 2 * {numbers} + 1"


def _asked(request: Logged) -> tuple[Rows | None, bytes | None]:
    """Return the rows of a request and the error that it must end in; None for the rows of what is no request."""
    if request.header("kafka_replyTopic") == b"forbidden":
        return None, b"reply_not_allowed"
    return _expected(request.value, request.header("inference-header-content-length"))


@lru_cache(4096)
def _expected(value: bytes | None, length: bytes | None) -> tuple[Rows | None, bytes | None]:
    try:
        shape, numbers = _tensor(value, length, "inputs", "x")
    except (ValueError, KeyError, TypeError):
        return None, b"invalid_payload"
    lowest = int(min(numbers[:: shape[1]]))
    return (shape, numbers), b"resource_exhausted" if lowest == -6 else BROKEN_ROWS.get(lowest)


def _tensor(value: bytes | None, length: bytes | None, side: str, name: str) -> Rows:
    """Return the one tensor of a body, in either encoding."""
    value = value or b""
    body: Any = json.loads(value[: int(length)] if length else value)
    [tensor] = body[side]
    assert tensor["name"] == name
    shape = tuple(tensor["shape"])
    if length:
        raw = value[int(length) :]
        assert tensor["parameters"]["binary_data_size"] == len(raw)
        numbers = struct.unpack(f"<{len(raw) // 4}f", raw)
    else:
        numbers = tuple(map(float, _flat(tensor["data"])))
    assert len(numbers) == shape[0] * shape[1]
    return shape, numbers


def _flat(nested: list[Any]) -> list[Any]:
    return [number for row in nested for number in _flat(row)] if nested and isinstance(nested[0], list) else nested
