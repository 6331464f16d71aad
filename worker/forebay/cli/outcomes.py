"""How an outcome looks on a terminal, and as JSON for programs. Shared by `results`, `request` and `dlq`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.records import Headers, Record
from forebay.wire import InferenceError, Result, WireError, parse_outcome, text_header
from forebay.wire.tensors import DATATYPES
from forebay_schemas import headers as names

SHOWN = 8
"""Elements of an output that a line shows."""

INTEGERS = {names.REPLY_PARTITION: 4, names.DLT_PARTITION: 4, names.DLT_OFFSET: 8, names.DLT_TIMESTAMP: 8}
"""Headers whose value is a big-endian integer, with its bytes."""


def read_outcome(record: Record) -> Result | InferenceError | WireError:
    """Read an outcome record; what is none is returned, too, so that a foreign record ends no command."""
    try:
        return parse_outcome(record.value or b"", record.headers)
    except WireError as error:
        return error


def as_json(outcome: Result | InferenceError | WireError) -> dict[str, Any]:
    """Give an outcome as plain values."""
    if isinstance(outcome, WireError):
        return {"status": "unreadable", "error": str(outcome)}
    shared = {"id": outcome.id, "source": outcome.source, "headers": headers_as_json(outcome.headers)}
    if isinstance(outcome, InferenceError):
        told = {"status": names.ERROR, "code": outcome.code, "error": outcome.message, "retriable": outcome.retriable}
        return told | shared
    outputs = {name: _elements(values) for name, values in outcome.outputs.items()}
    model = {"model": outcome.model, "model_version": outcome.version, "batch_size": outcome.batch_size}
    return {"status": names.OK} | shared | model | {"outputs": outputs}


def record_as_json(record: Record) -> dict[str, Any]:
    """Give an outcome record as plain values, with its own place."""
    place = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
    return as_json(read_outcome(record)) | place | {"timestamp_ms": record.timestamp_ms, "key": as_text(record.key)}


def headers_as_json(headers: Headers) -> dict[str, Any]:
    """Give headers by name; of equal names the last one counts. Those that are integers by contract are shown so."""
    shown = {}
    for name, value in headers:
        number = integer(value, INTEGERS[name]) if name in INTEGERS else None
        shown[name] = as_text(value) if number is None else number
    return shown


def integer(value: bytes | None, width: int | None) -> int | None:
    """Read a big-endian integer of `width` bytes, or one in ASCII digits; None if it is neither."""
    if value is not None and len(value) == width:
        return int.from_bytes(value, "big", signed=True)
    return int(value) if value is not None and value.isdigit() else None


def printable(text: str) -> str:
    """Escape control characters: what a stranger sent must not steer the terminal."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)


def shown_value(value: Any) -> str:
    """Show a header's value, bytes as `--header` takes them: 0x and their hexadecimal digits."""
    if isinstance(value, dict):
        return f"0x{base64.b64decode(value['base64']).hex()}"
    return "(none)" if value is None else str(value)


def as_text(value: bytes | None) -> Any:
    """Give UTF-8 as text, other bytes as `{"base64": …}`."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def as_line(outcome: Result | InferenceError | WireError) -> str:
    """Describe an outcome in one line of rich markup, without its id."""
    if isinstance(outcome, WireError):
        return f"[yellow]unreadable[/] {_escaped(str(outcome))}"
    if isinstance(outcome, InferenceError):
        return f"[red]error[/] {outcome.code} {_escaped(outcome.message)}"
    batch = f" [dim]batch {outcome.batch_size}[/]" if outcome.batch_size else ""
    shown = "  ".join(f"[cyan]{_escaped(name)}[/] {summary(values)}" for name, values in outcome.outputs.items())
    return f"[green]ok[/] {shown}{batch}"


def key_of(record: Record) -> str:
    """Give the request id that a record is keyed by, as text."""
    return printable((record.key or b"").decode("utf-8", "backslashreplace"))


def matches(record: Record, ids: Sequence[str]) -> bool:
    """Whether a record belongs to one of the request ids; every record does if there are none."""
    return not ids or key_of(record) in ids or text_header(record.headers, names.REQUEST_ID) in ids


def summary(values: Any) -> str:
    """Describe a tensor shortly: a few elements, or the largest three of a long row with their places."""
    if isinstance(values, list):
        shown = ", ".join(_escaped(repr(element.decode("utf-8", "backslashreplace"))[:60]) for element in values[:3])
        return shown + (f" … {len(values)} elements" if len(values) > 3 else "")
    shape = f"[dim]{_datatype(values)}{_escaped(str(list(values.shape)))}[/]"
    if values.size <= SHOWN:
        return f"{shape} {_escaped(' '.join(_number(value) for value in values.ravel()))}"
    if values.ndim == 2 and values.shape[0] == 1 and values.dtype.kind in "fiu":
        row = values[0].astype(np.float64)
        largest = np.argsort(-row, kind="stable")[:3]
        return f"{shape} largest " + ", ".join(f"#{place}: {_number(values[0][place])}" for place in largest)
    first = " ".join(_number(value) for value in values.ravel()[:SHOWN])
    return f"{shape} {_escaped(first)} …"


def _datatype(values: Any) -> str:
    """Name an array's type as the wire does."""
    return DATATYPES.get(values.dtype, str(values.dtype))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def _elements(values: Any) -> Any:
    if isinstance(values, list):
        return {"datatype": "BYTES", "shape": [len(values)], "data": [as_text(element) for element in values]}
    return {"datatype": _datatype(values), "shape": list(values.shape), "data": _finite(values)}


def _finite(values: Any) -> Any:
    """Give nested lists in which NaN and infinities are text, because JSON has none."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        exact = values.astype(object)
        exact[~np.isfinite(values)] = [str(value) for value in values[~np.isfinite(values)]]
        return exact.tolist()
    return values.tolist()


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(printable(text))
