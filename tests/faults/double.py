"""What `tests.models:Double` must answer, computed again from the bytes of the request, without the worker's codec."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.faults.history import Logged, is_error

BROKEN_ROWS = {-1: b"model_error", -2: b"poisoned", -3: b"poisoned", -4: b"poisoned", -5: b"non_finite_output"}
"""What a row's first number makes of a request, by `tests.models.Magic`; -6 is out of memory."""


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
    answered = _answered(outcome)
    return (
        None if np.array_equal(answered, rows * 2 + 1) else f"it says {answered.tolist()}, not 2 * {rows.tolist()} + 1"
    )


def _asked(request: Logged) -> tuple[npt.NDArray[np.float32] | None, bytes | None]:
    """Return the rows of a request and the error that it must end in; None for the rows of what is no request."""
    if request.header("kafka_replyTopic") == b"forbidden":
        return None, b"reply_not_allowed"
    try:
        rows = _tensor(request, "inputs", "x")
    except (ValueError, KeyError, TypeError):
        return None, b"invalid_payload"
    lowest = int(rows[:, 0].min())
    return rows, b"resource_exhausted" if lowest == -6 else BROKEN_ROWS.get(lowest)


def _answered(outcome: Logged) -> npt.NDArray[np.float32]:
    return _tensor(outcome, "outputs", "y")


def _tensor(record: Logged, side: str, name: str) -> npt.NDArray[np.float32]:
    """Return the one tensor of a body, in either encoding."""
    value = record.value or b""
    length = record.header("inference-header-content-length")
    body: Any = json.loads(value[: int(length)] if length else value)
    [tensor] = body[side]
    assert tensor["name"] == name
    if length:
        assert tensor["parameters"]["binary_data_size"] == len(value) - int(length)
        return np.frombuffer(value[int(length) :], "<f4").reshape(tensor["shape"])
    return np.array(tensor["data"], np.float32).reshape(tensor["shape"])
