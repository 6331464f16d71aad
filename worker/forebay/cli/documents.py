"""JSON texts as requests for `forebay send` and its relatives: protocol documents as they are, and the short form.

Knows the wire, and nothing of files or Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from forebay.errors import UsageError
from forebay.records import Headers
from forebay.wire import RequestOptions, WireEncoding, WireError, build_request

SHORT_FORM = (
    "in the short form every key but id (a string), parameters (an object) and outputs (objects with a name) is a "
    'tensor: {"id": "p0", "x": [[1.0, 2.0]]}'
)


@dataclass(frozen=True, slots=True)
class Form:
    """How files become requests. `input` names the tensor where a file does not; `size` is (height, width)."""

    input: str = "input"
    encoding: WireEncoding = "binary"
    pixels: bool = False
    size: tuple[int, int] | None = None
    raw: bool = False
    options: RequestOptions = field(default_factory=lambda: RequestOptions())


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to send. `id` is what the body or the file says, else None; `origin` is for messages."""

    value: bytes
    headers: Headers
    id: str | None
    origin: str


def document(origin: str, text: bytes, form: Form) -> Prepared:
    """Take an OIP document as it is, or build a request from the short form, `{"name": values}`."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{origin}: not JSON: {error}; use --raw to send it all the same") from error
    if not isinstance(found, dict):
        raise UsageError(f"{origin}: a request is a JSON object, not {_kind(found)}")
    if isinstance(found.get("inputs"), list) and all(isinstance(entry, dict) for entry in found["inputs"]):
        _check(origin, text)
        _, headers = build_request({"any": [0]}, encoding="json", **_without_document(form.options))
        return Prepared(text, headers, found.get("id"), origin)
    return _short_form(origin, found, form)


def _short_form(origin: str, found: dict[str, Any], form: Form) -> Prepared:
    """Build a request; no tensor is a string, an object, or a list of objects, so these keys cannot be mistaken."""
    options = form.options.copy()
    if isinstance(found.get("id"), str):
        options["id"] = found.pop("id")
    elif isinstance(found.get("id"), int):
        raise UsageError(f'{origin}: a request id is a string: write "id": "{found["id"]}"')
    if isinstance(found.get("parameters"), dict):
        options["parameters"] = found.pop("parameters")
    outputs = found.get("outputs")
    if isinstance(outputs, list) and outputs and all(isinstance(one, dict) and "name" in one for one in outputs):
        options["outputs"] = [one["name"] for one in found.pop("outputs")]
    for name, values in found.items():
        if values is None or isinstance(values, str | dict):
            raise UsageError(f"{origin}: {name} is {_kind(values)}, no tensor; {SHORT_FORM}")
    told = Form(form.input, form.encoding, form.pixels, form.size, form.raw, options)
    return build(origin, found, told, options.get("id"))


def _kind(value: Any) -> str:
    """Name a JSON value's kind as JSON does."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _without_document(options: RequestOptions) -> RequestOptions:
    """Keep what travels as headers; the document stays as it is."""
    kept = options.copy()
    for name in ("id", "outputs", "parameters"):
        kept.pop(name, None)  # type: ignore[misc]
    return kept


def _check(origin: str, text: bytes) -> None:
    from pydantic import ValidationError

    from forebay_schemas import InferenceRequest

    try:
        InferenceRequest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(
            f"{origin}: {place + ': ' if place else ''}{message}; use --raw to send it all the same"
        ) from error


def build(origin: str, inputs: Mapping[str, Any], form: Form, id: str | None) -> Prepared:
    """Build a request. Raises UsageError, with its origin, for what cannot travel."""
    try:
        value, headers = build_request(inputs, encoding=form.encoding, **form.options)
    except WireError as error:
        raise UsageError(f"{origin}: {error}") from error
    return Prepared(value, headers, id, origin)
