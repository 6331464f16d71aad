"""Requests, results and error results as record values and headers, and back.

Runs in the caller's thread; needs numpy and no Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Unpack

import orjson

from forebay.records import RETRIABLE, Code, Headers
from forebay.wire.tensors import (
    Packed,
    WireError,
    from_bytes,
    from_json_elements,
    pack,
    to_bytes,
    to_json_elements,
    unpack,
)
from forebay.wire.values import (
    InferenceError,
    Inputs,
    ParsedRequest,
    RequestOptions,
    Result,
    WireEncoding,
    text_header,
)
from forebay_schemas import headers as names

MAX_ID_BYTES = 256


def build_request(
    inputs: Inputs, *, encoding: WireEncoding = "binary", **options: Unpack[RequestOptions]
) -> tuple[bytes, Headers]:
    """Give the value and the headers of a request record.

    Raises WireError, with the tensor's name, for what cannot travel.
    """
    check_inputs(inputs)
    check_options(options)
    packed = [pack(name, values) for name, values in inputs.items()]
    rows = {tensor.shape[0] for tensor in packed}
    if len(rows) > 1:
        found = ", ".join(f"{tensor.name} {tensor.shape[0]}" for tensor in packed)
        raise WireError(f"inputs differ in rows, their first dimension: {found}; one row is [[…]] or [value]")
    document: dict[str, Any] = {}
    if "id" in options:
        document["id"] = _checked_id(options["id"])
    parameters = dict(options.get("parameters") or {})
    if parameters:
        document["parameters"] = parameters
    if options.get("outputs"):
        document["outputs"] = [{"name": name} for name in options["outputs"]]
    value, headers = _encode(document, "inputs", packed, encoding)
    return value, headers + _option_headers(options)


def check_inputs(inputs: Any) -> None:
    """Raise WireError unless there are tensors by name."""
    if not isinstance(inputs, Mapping):
        raise WireError(f"inputs must be a mapping of tensor names to arrays, not {type(inputs).__name__}")
    if not inputs:
        raise WireError("a request needs at least one input")
    wrong = next((name for name in inputs if not isinstance(name, str)), None)
    if wrong is not None:
        raise WireError(f"a tensor's name is a string, not {wrong!r}")


def check_options(options: Any) -> None:
    """Raise WireError for an option that is none, or that is of the wrong kind: an unread one would go unnoticed."""
    known = RequestOptions.__annotations__
    wrong = next((name for name in options if name not in known), None)
    if wrong is not None:
        near = get_close_matches(wrong, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
        raise WireError(f"a request has no option {wrong}; {hint}")
    if isinstance(options.get("outputs"), str):
        raise WireError(f"outputs is a list of names, such as [{options['outputs']!r}], not a lone string")


def _checked_id(id: Any) -> str:
    if not isinstance(id, str):
        raise WireError(f"a request id is a string, not {type(id).__name__}")
    if not id or len(id.encode()) > MAX_ID_BYTES:
        raise WireError(f"a request id has 1 to {MAX_ID_BYTES} bytes, not {len(id.encode())}")
    return id


def _option_headers(options: RequestOptions) -> Headers:
    headers: Headers = []
    for name, value in (
        (names.MODEL, options.get("model")),
        (names.MODEL_VERSION, options.get("version")),
        (names.TIMEOUT_MS, options.get("timeout_ms")),
        (names.PRIORITY, options.get("priority")),
    ):
        if value is not None:
            headers.append((name, str(value).encode()))
    return headers + list(options.get("headers") or ())


def _encode(
    document: dict[str, Any], side: str, packed: Sequence[Packed], encoding: WireEncoding
) -> tuple[bytes, Headers]:
    blobs: list[bytes] = []
    tensors = []
    for tensor in packed:
        entry: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype}
        if encoding == "binary":
            blobs.append(to_bytes(tensor))
            entry["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            entry["data"] = to_json_elements(tensor)
        tensors.append(entry)
    try:
        json = orjson.dumps(document | {side: tensors}, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise WireError(f"parameters must be strings, numbers or booleans: {error}") from error
    if encoding == "json":
        return json, [(names.CONTENT_TYPE, names.JSON.encode())]
    length = str(len(json)).encode()
    headers: Headers = [(names.CONTENT_TYPE, names.BINARY.encode()), (names.JSON_LENGTH, length)]
    return b"".join([json, *blobs]), headers


def _decode(value: bytes, headers: Headers) -> tuple[dict[str, Any], memoryview, WireEncoding]:
    content_type = (text_header(headers, names.CONTENT_TYPE) or names.JSON).partition(";")[0].strip().lower()
    rest = memoryview(value)
    encoding: WireEncoding = "json"
    if content_type == names.BINARY:
        length = text_header(headers, names.JSON_LENGTH) or ""
        if not (length.isascii() and length.isdigit()) or int(length) > len(value):
            raise WireError(f"header {names.JSON_LENGTH} must say how many bytes of the value are JSON, not {length!r}")
        rest, value, encoding = rest[int(length) :], value[: int(length)], "binary"
    elif content_type != names.JSON:
        raise WireError(f"content-type {content_type!r} is neither {names.JSON} nor {names.BINARY}")
    else:
        rest = rest[len(value) :]
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise WireError(f"the value is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise WireError("the value is not a JSON object")
    return document, rest, encoding


def _tensors(document: dict[str, Any], side: str, rest: memoryview) -> dict[str, Packed]:
    if side not in document:
        raise WireError(f"the value has no {side}")
    found: dict[str, Packed] = {}
    try:
        for entry in document[side]:
            name, datatype, shape = entry["name"], entry["datatype"], tuple(entry["shape"])
            size = (entry.get("parameters") or {}).get("binary_data_size")
            if size is None:
                found[name] = from_json_elements(name, datatype, shape, entry["data"])
            else:
                if size > len(rest):
                    raise WireError(f"{name}: {size} bytes are announced, {len(rest)} are left")
                found[name] = from_bytes(name, datatype, shape, rest[:size])
                rest = rest[size:]
    except (KeyError, TypeError, AttributeError) as error:
        raise WireError(f"{side} is not a list of tensors with name, shape, datatype and data: {error!r}") from error
    if len(rest):
        raise WireError(f"{len(rest)} bytes follow the last tensor")
    return found


def parse_request(value: bytes, headers: Headers) -> ParsedRequest:
    """Read a request record; the inverse of `build_request`."""
    document, rest, encoding = _decode(value, headers)
    tensors = _tensors(document, "inputs", rest)
    wanted = [output["name"] for output in document.get("outputs") or ()] or None
    id = text_header(headers, names.REQUEST_ID) or document.get("id")
    return ParsedRequest(id, tensors, encoding, document.get("parameters") or {}, wanted)


def build_result(
    outputs: Inputs, *, id: str, model: str, version: str | None = None, encoding: WireEncoding = "binary"
) -> tuple[bytes, Headers]:
    """Give the value and the headers of a result record; the echoed headers are the caller's to add."""
    document: dict[str, Any] = {"model_name": model, "id": id}
    if version is not None:
        document["model_version"] = version
    value, headers = _encode(document, "outputs", [pack(name, values) for name, values in outputs.items()], encoding)
    headers += [(names.STATUS, names.OK.encode()), (names.MODEL, model.encode())]
    return value, headers


def build_error(id: str, code: Code, message: str) -> tuple[bytes, Headers]:
    """Give the value and the headers of an error result."""
    value = orjson.dumps({"id": id, "error": message, "code": code.value, "retriable": code in RETRIABLE})
    return value, [
        (names.CONTENT_TYPE, names.JSON.encode()),
        (names.STATUS, names.ERROR.encode()),
        (names.ERROR_CODE, code.value.encode()),
    ]


def parse_outcome(value: bytes, headers: Headers) -> Result | InferenceError:
    """Read an outcome record: a result, or an error result as an exception to raise or to look at.

    Raises WireError if it is neither.
    """
    document, rest, _ = _decode(value, headers)
    if text_header(headers, names.STATUS) == names.ERROR or "error" in document:
        code = document.get("code") or text_header(headers, names.ERROR_CODE) or Code.INTERNAL.value
        message, retriable = str(document.get("error", "")), bool(document.get("retriable", False))
        return InferenceError(str(document.get("id", "")), str(code), message, retriable, headers)
    outputs = {name: unpack(tensor) for name, tensor in _tensors(document, "outputs", rest).items()}
    return Result(
        id=str(document.get("id", "")),
        outputs=outputs,
        model=str(document.get("model_name", "")),
        version=document.get("model_version"),
        parameters=document.get("parameters") or {},
        headers=headers,
    )


def parse_result(value: bytes, headers: Headers) -> Result:
    """Read a result record. Raises InferenceError for an error result, WireError for what is neither."""
    outcome = parse_outcome(value, headers)
    if isinstance(outcome, InferenceError):
        raise outcome
    return outcome
