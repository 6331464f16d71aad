"""Decoding: a record becomes a valid request, or a refusal with its code. Runs in the loop's thread.

Two encodings of the Open Inference Protocol, version 2: JSON, parsed by simdjson straight into a typed buffer, and
the binary tensor extension, where a tensor is a slice of the record's own value. The decoder knows the models by
their signatures alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import simdjson

from forebay.errors import RequestError
from forebay.records import Code, Encoding, Failure, Headers, Record, Reply, Request, Signature
from forebay.settings import Limits
from forebay.stream import tensors
from forebay.stream.body import Plan, brief, read_id, read_parameters
from forebay.stream.headers import MAX_ID_BYTES, Envelope, HeaderReader, earliest, started
from forebay.stream.tensors import Shape

UNREADABLE = "forebay-unreadable"
"""The header of a record that was never read whole: it says why, and its value is missing."""

DEFAULT_PRIORITY = 5
"""The level of a request that names none; 1 is the most urgent, 9 the least."""

_BINARY = Encoding.BINARY  # looking a member of an enumeration up costs 0.15 µs in Python 3.11
_PLANS = 1024
_PLANNED_LENGTH = 4096
_COPIED = 2048


@dataclass(slots=True)
class Refusal:
    """A record that did not become a request, with all that its error result needs."""

    record: Record
    id: str
    model: str
    failure: Failure
    arrived: float
    reply: Reply | None = None
    echo: Headers = field(default_factory=list)
    attempts: int = 0


class Decoder:
    """Decodes the records of one worker.

    `signatures` lists the served models, the default first. `reply_topics` are regular expressions that must match
    a whole topic name. `default_timeout_ms` counts from the record's timestamp for requests that name no deadline, 0
    for none. `tenant_header` names the header whose value fairness goes by.
    """

    def __init__(
        self,
        signatures: Sequence[Signature],
        limits: Limits,
        reply_topics: Sequence[str] = (),
        *,
        default_timeout_ms: int = 0,
        tenant_header: str | None = None,
    ) -> None:
        self._default = signatures[0]
        self._models = {signature.model: signature for signature in signatures}
        self._max_bytes = limits.max_request_bytes
        self._headers = HeaderReader(limits, tenant_header)
        self._default_timeout_ms = default_timeout_ms
        self._reply_topics = [re.compile(pattern) for pattern in reply_topics]
        self._parser = simdjson.Parser()
        self._shapes = {id(signature): Shape(signature) for signature in signatures}
        self._default_shape = self._shapes[id(self._default)]
        self._plans: dict[Shape, dict[bytes, Plan]] = {shape: {} for shape in self._shapes.values()}
        self._last_plan: tuple[Shape, bytes, Plan] | None = None
        self._seen_id: str | None = None

    def decode(self, record: Record, now: float, now_ms: float) -> Request | Refusal:
        """Turn a record into a request, or into a refusal.

        `now` is the monotonic clock in seconds, `now_ms` the wall clock in milliseconds since the epoch: together
        they turn a deadline on the wall into one on the worker's clock.
        """
        self._seen_id = None
        kept = self._headers.kept(record.headers)
        envelope = Envelope() if kept is None else kept
        try:
            if kept is None:
                self._headers.read(record, envelope)
            return self._decode(record, envelope, now, now_ms)
        except RequestError as error:
            failure = error.failure
        except RecursionError:
            failure = Failure(Code.INVALID_PAYLOAD, "the request is nested too deeply")
        if envelope.id is None and self._seen_id is None:
            self._seen_id = self._peek_id(record.value, envelope)
        return Refusal(
            record=record,
            id=self._identify(record, envelope.id, self._seen_id),
            model=envelope.model or self._default.model,
            failure=failure,
            arrived=now,
            reply=self._reply(envelope) if self._may_reply(envelope) else None,
            echo=envelope.echo,
        )

    def identify(self, record: Record) -> str:
        """Return the id that `decode` would give a record, without decoding where a header says it."""
        envelope = self._headers.kept(record.headers)
        if envelope is None:
            envelope = Envelope()
            with contextlib.suppress(RequestError):
                self._headers.read(record, envelope)
        return envelope.id or self.decode(record, 0.0, 0.0).id

    def _decode(self, record: Record, envelope: Envelope, now: float, now_ms: float) -> Request:
        value = record.value
        if not value:
            unreadable = dict(record.headers).get(UNREADABLE)
            why = (
                "the record has no value"
                if unreadable is None
                else f"the record is unreadable: {unreadable.decode(errors='replace')}"
            )
            raise RequestError(Code.INVALID_PAYLOAD, why)
        if len(value) > self._max_bytes:
            raise RequestError(Code.TOO_LARGE, f"the request has {len(value)} bytes, the limit is {self._max_bytes}")
        shape = self._default_shape
        if envelope.model is not None or envelope.version is not None:
            shape = self._shapes[id(self._find_model(envelope))]
        reply = self._reply(envelope) if envelope.reply_topic is not None else None
        if envelope.encoding is _BINARY:
            plan, content = self._binary(value, envelope, shape)
        else:
            plan, content = self._json(value, shape, envelope)
        deadline_ms = envelope.deadline_ms
        if plan.timeout_us is not None or envelope.timeout_ms is not None:
            deadline_ms = earliest(record, envelope, plan.timeout_us, now_ms)
        elif deadline_ms is None and self._default_timeout_ms:
            deadline_ms = started(record, now_ms) + self._default_timeout_ms
        layout = plan.layout
        return Request(
            record,
            envelope.id or plan.id or self._identify(record, None, None),
            shape.model,
            layout.rows,
            content,
            layout.shapes,
            envelope.encoding,
            layout.lane,
            layout.item_bytes if layout.item_bytes >= 0 else tensors.size_of(content),
            now,
            None if deadline_ms is None else now + (deadline_ms - now_ms) / 1000,
            envelope.priority or plan.priority or DEFAULT_PRIORITY,
            reply,
            plan.wanted,
            envelope.echo or [],  # equal headers share an envelope, never a list
            0,
            envelope.tenant,
        )

    def _identify(self, record: Record, header: str | None, body: str | None) -> str:
        """Return the first id that is present: header, body, key, position."""
        if header:
            return header
        if body:
            return body
        key = record.key
        if key and len(key) <= MAX_ID_BYTES:
            try:
                return key.decode()
            except UnicodeDecodeError:
                pass
        return record.source

    def _peek_id(self, value: bytes | None, envelope: Envelope) -> str | None:
        """Find the id in the body of a request that was refused before its body was read."""
        if not value or len(value) > self._max_bytes:
            return None
        binary = envelope.encoding is Encoding.BINARY
        try:
            found = simdjson.Parser().parse(value[: envelope.header_bytes or 0] if binary else value)
            return read_id(found["id"]) if isinstance(found, simdjson.Object) else None
        except (ValueError, KeyError, RuntimeError, RequestError):
            return None

    def _find_model(self, envelope: Envelope) -> Signature:
        wanted = envelope.model or self._default.model
        signature = self._models.get(wanted)
        if signature is None:
            message = f"this worker does not serve {wanted!r}; it serves {', '.join(self._models)}"
        elif envelope.version in (None, signature.version):
            return signature
        else:
            message = f"model {wanted!r} has no version {envelope.version!r} here; it has {signature.version}"
        raise RequestError(Code.UNKNOWN_MODEL, message)

    def _may_reply(self, envelope: Envelope) -> bool:
        topic = envelope.reply_topic
        return topic is None or any(pattern.fullmatch(topic) for pattern in self._reply_topics)

    def _reply(self, envelope: Envelope) -> Reply | None:
        if envelope.reply_topic is None:
            return None
        if self._may_reply(envelope):
            return Reply(envelope.reply_topic, envelope.reply_partition)
        raise RequestError(
            Code.REPLY_NOT_ALLOWED, f"kafka.reply_topics does not allow replies to {envelope.reply_topic!r}"
        )

    def _json(self, value: bytes, shape: Shape, envelope: Envelope) -> tuple[Plan, list[Any]]:
        document = self._parse(value)
        if not isinstance(document, simdjson.Object):
            raise RequestError(Code.INVALID_PAYLOAD, "the value must be a JSON object with inputs")
        present = list(document)  # asking simdjson for a key that is not there costs a C++ exception, 2.3 µs
        body_id = self._seen_id = read_id(document["id"]) if "id" in present else None
        inputs = document["inputs"] if "inputs" in present else None
        if not isinstance(inputs, simdjson.Array):
            raise RequestError(Code.INVALID_PAYLOAD, "the request has no list of inputs")
        layout, content = shape.from_json(inputs)
        wanted, timeout, priority = None, None, 0
        if "outputs" in present:
            outputs = document["outputs"]
            wanted = shape.wanted(outputs.as_list()) if isinstance(outputs, simdjson.Array) else None
        if "parameters" in present:
            found = document["parameters"]
            timeout, priority = read_parameters(found.as_dict() if isinstance(found, simdjson.Object) else found)
        return Plan(body_id, (), layout, wanted, timeout, priority), content

    def _parse(self, value: bytes) -> Any:
        try:
            try:
                return self._parser.parse(value)
            except RuntimeError as error:
                if "re-use" not in str(error):  # whole numbers beyond 64 bits are RuntimeErrors, too
                    raise
                self._parser = simdjson.Parser()  # a document of the last call is still referenced somewhere
                return self._parser.parse(value)
        except (ValueError, RuntimeError) as error:
            if str(error).startswith(("BIGINT_ERROR", "NUMBER_ERROR")):
                with contextlib.suppress(ValueError, RuntimeError):
                    # JavaScript writes 1e20 with all its digits; simdjson knows whole numbers up to 64 bits only.
                    return simdjson.Parser().parse(orjson.dumps(orjson.loads(value)))
            raise RequestError(Code.INVALID_PAYLOAD, f"the value is not valid JSON: {brief(error)}") from None

    def _binary(self, value: bytes, envelope: Envelope, shape: Shape) -> tuple[Plan, list[Any]]:
        length = envelope.header_bytes
        if length is None:
            raise RequestError(
                Code.INVALID_PAYLOAD, "a binary request needs the header inference-header-content-length"
            )
        if not 0 < length <= len(value):
            raise RequestError(
                Code.INVALID_PAYLOAD,
                f"inference-header-content-length is {length}, outside the value of {len(value)} bytes",
            )
        last = self._last_plan
        if last is not None and last[0] is shape and len(last[1]) == length and value.startswith(last[1]):
            plan = last[2]
        else:
            plan = self._planned(value[:length], shape)
        if plan.plain_bytes == len(value) - length:
            # A copy is cheaper than a view where it is short: a view is three objects.
            return plan, [value[length:] if len(value) < _COPIED else memoryview(value)[length:]]
        return plan, shape.from_binary(value, length, plan.tensors)

    def _planned(self, head: bytes, shape: Shape) -> Plan:
        """Return the plan of a binary request's JSON part: equal ones are read once."""
        plans = self._plans[shape]
        plan = plans.get(head)
        if plan is None:
            plan = self._plan(head, shape)
            if plan.id is None and len(head) < _PLANNED_LENGTH:
                if len(plans) >= _PLANS:
                    plans.clear()
                plans[head] = plan
        self._last_plan = (shape, head, plan) if plan.id is None else None
        return plan

    def _plan(self, head: bytes, shape: Shape) -> Plan:
        body = tensors.read_head(head)
        body_id = read_id(body.id)
        self._seen_id = body_id
        parts, layout = shape.from_head(body)
        wanted = shape.wanted(body.outputs) if body.outputs is not None else None
        timeout, priority = read_parameters(body.parameters)
        plain_bytes = parts[0].end if len(parts) == 1 and parts[0].is_plain else -1
        return Plan(body_id, parts, layout, wanted, timeout, priority, plain_bytes)
