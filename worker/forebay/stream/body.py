"""What the body of a request says beside its tensors: id, time-out, priority."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import RequestError
from forebay.records import Code
from forebay.stream.headers import MAX_ID_BYTES
from forebay.stream.tensors import Layout, Tensor

_LONGEST_TIMEOUT_US = 10**18


@dataclass(frozen=True, slots=True)
class Plan:
    """What the JSON part of a binary request says; equal parts need to be read once.

    `plain_bytes` is the length of a single tensor that is a slice of the value as it stands; -1 where there is more.
    """

    id: str | None
    tensors: tuple[Tensor, ...]
    layout: Layout
    wanted: tuple[int, ...] | None
    timeout_us: float | None
    priority: int
    plain_bytes: int = -1


def read_id(found: object) -> str | None:
    if found is None or found == "":
        return None
    if not isinstance(found, str):
        raise RequestError(Code.INVALID_PAYLOAD, "the request's id must be a string")
    if len(found.encode()) > MAX_ID_BYTES:
        raise RequestError(Code.INVALID_PAYLOAD, f"the request's id is longer than {MAX_ID_BYTES} bytes")
    return found


def read_parameters(found: object) -> tuple[float | None, int]:
    """Return the time-out in microseconds and the priority that a request's parameters ask for."""
    if found is None:
        return None, 0
    if not isinstance(found, dict):
        raise RequestError(Code.INVALID_PAYLOAD, "the request's parameters must be an object")
    timeout, priority = found.get("timeout"), found.get("priority", 0)
    if timeout is not None:
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout < 0:
            raise RequestError(Code.INVALID_PAYLOAD, "parameters.timeout must be a number of microseconds from 0")
        timeout = float(min(timeout, _LONGEST_TIMEOUT_US))
    if isinstance(priority, bool) or not isinstance(priority, int) or priority < 0:
        raise RequestError(Code.INVALID_PAYLOAD, "parameters.priority must be a whole number from 0")
    return timeout, min(priority, 9)


def brief(error: Exception) -> str:
    """Say what simdjson found, in words that do not frighten."""
    code, _, text = str(error).partition(": ")
    return _SAID.get(code, (text or code).split(".")[0].strip()[:120])


_SAID = {
    "TAPE_ERROR": "a comma, brace, quote or key is missing or too many (NaN and Infinity are no JSON)",
    "NUMBER_ERROR": "a number is malformed or too large",
    "UTF8_ERROR": "it is not UTF-8",
    "UNCLOSED_STRING": "a string is not closed",
    "DEPTH_ERROR": "it is nested too deeply",
    "EMPTY": "it is empty",
}
