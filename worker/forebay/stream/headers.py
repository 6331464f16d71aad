"""What the headers of a request record say, read once. Values are opaque bytes unless the contract says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.errors import RequestError
from forebay.records import Code, Encoding, Headers, Record
from forebay.settings import Limits

MAX_ID_BYTES = 256
_ECHOED = frozenset({"kafka_correlationId", "correlation_id", "traceparent", "tracestate", "baggage"})
_JSON_TYPES = frozenset({b"application/json", b"application/vnd.oip+json", b""})
_KEPT = 512
_KEPT_LENGTH = 4


@dataclass(slots=True)
class Envelope:
    """What the headers of a record say."""

    id: str | None = None
    encoding: Encoding = Encoding.JSON
    header_bytes: int | None = None
    model: str | None = None
    version: str | None = None
    deadline_ms: float | None = None
    timeout_ms: int | None = None
    priority: int = 0
    reply_topic: str | None = None
    reply_partition: int | None = None
    echo: Headers = field(default_factory=list)
    tenant: bytes | None = None


class HeaderReader:
    """Reads headers; requests that differ in nothing but their body have equal headers, which are read once."""

    def __init__(self, limits: Limits, tenant_header: str | None = None) -> None:
        self._limits = limits
        self._tenant_header = tenant_header
        self._kept: dict[tuple[tuple[str, bytes | None], ...], Envelope] = {}
        self._last: tuple[Headers, Envelope] | None = None

    def kept(self, headers: Headers) -> Envelope | None:
        """Return what equal headers said before; a record with the headers of the one before it shares their list."""
        last = self._last
        if last is not None and last[0] is headers:
            return last[1]
        found = self._kept.get(tuple(headers)) if len(headers) <= _KEPT_LENGTH else None
        self._last = None if found is None else (headers, found)
        return found

    def read(self, record: Record, envelope: Envelope) -> None:
        """Fill `envelope`; where it raises RequestError, the envelope has what the other headers say."""
        self._read(record, envelope)
        headers = record.headers
        if len(headers) > _KEPT_LENGTH or envelope.id is not None or envelope.echo or envelope.deadline_ms is not None:
            return
        if len(self._kept) >= _KEPT:
            self._kept.clear()
        self._kept[tuple(headers)] = envelope

    def _read(self, record: Record, envelope: Envelope) -> None:
        headers = record.headers
        if len(headers) > self._limits.max_headers:
            raise RequestError(
                Code.INVALID_PAYLOAD, f"the record has {len(headers)} headers, the limit is {self._limits.max_headers}"
            )
        failed: RequestError | None = None
        for name, value in headers:
            if name == self._tenant_header:
                envelope.tenant = value
            reader = _READERS.get(name)
            if reader is not None:
                if value is not None:
                    try:
                        reader(envelope, value, record)
                    except RequestError as error:  # the echoed headers behind it must still come back
                        failed = failed or error
            elif name in _ECHOED or name.startswith("ce_"):
                envelope.echo.append((name, value))
        if envelope.echo:
            size = sum(len(name) + len(value or b"") for name, value in envelope.echo)
            if size > self._limits.max_header_bytes:
                envelope.echo.clear()
                raise RequestError(
                    Code.INVALID_PAYLOAD,
                    f"the headers to echo have {size} bytes, the limit is {self._limits.max_header_bytes}",
                )
        if failed is not None:
            raise failed


def started(record: Record, now_ms: float) -> float:
    """Return the time from which a request's time-out counts, in milliseconds of the wall clock."""
    return record.timestamp_ms if record.timestamp_ms > 0 else now_ms


def earliest(record: Record, envelope: Envelope, timeout_us: float | None, now_ms: float) -> float:
    """Return the deadline of a request with a time-out, in milliseconds of the wall clock: the first that there is.

    A time-out counts from the record's timestamp; a record without one counts from its arrival.
    """
    start = started(record, now_ms)
    limits = (
        envelope.deadline_ms,
        None if envelope.timeout_ms is None else start + envelope.timeout_ms,
        None if timeout_us is None else start + timeout_us / 1000,
    )
    return min(limit for limit in limits if limit is not None)


def _digits(name: str, value: bytes) -> int:
    if not value.isdigit() or len(value) > 18:
        raise RequestError(Code.INVALID_PAYLOAD, f"the header {name} must be a number in ASCII digits")
    return int(value)


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise RequestError(Code.INVALID_PAYLOAD, f"the header {name} is not UTF-8") from None


def _content_type(envelope: Envelope, value: bytes, record: Record) -> None:
    kind = value.split(b";", 1)[0].strip().lower()
    if kind == b"application/octet-stream":
        envelope.encoding = Encoding.BINARY
    elif kind not in _JSON_TYPES:
        shown = kind[:80].decode(errors="replace")
        raise RequestError(
            Code.UNSUPPORTED_TYPE, f"content-type {shown!r} is not one of application/json, application/octet-stream"
        )


def _request_id(envelope: Envelope, value: bytes, record: Record) -> None:
    if len(value) > MAX_ID_BYTES:
        raise RequestError(Code.INVALID_PAYLOAD, f"the header x-request-id is longer than {MAX_ID_BYTES} bytes")
    envelope.id = _text("x-request-id", value)


def _header_length(envelope: Envelope, value: bytes, record: Record) -> None:
    envelope.header_bytes = _digits("inference-header-content-length", value)


def _model(envelope: Envelope, value: bytes, record: Record) -> None:
    envelope.model = _text("model", value) or None


def _version(envelope: Envelope, value: bytes, record: Record) -> None:
    envelope.version = _text("model-version", value) or None


def _timeout(envelope: Envelope, value: bytes, record: Record) -> None:
    envelope.timeout_ms = _digits("timeout-ms", value)


def _deadline(envelope: Envelope, value: bytes, record: Record) -> None:
    envelope.deadline_ms = _digits("deadline-ms", value)


def _priority(envelope: Envelope, value: bytes, record: Record) -> None:
    envelope.priority = min(_digits("priority", value), 9)


def _reply_topic(envelope: Envelope, value: bytes, record: Record) -> None:
    envelope.reply_topic = _text("kafka_replyTopic", value)


def _reply_partition(envelope: Envelope, value: bytes, record: Record) -> None:
    partition = int.from_bytes(value, "big", signed=True)
    if len(value) != 4 or partition < 0:
        raise RequestError(
            Code.INVALID_PAYLOAD, "the header kafka_replyPartition must be a 4-byte big-endian integer from 0"
        )
    envelope.reply_partition = partition


_READERS = {
    "content-type": _content_type,
    "x-request-id": _request_id,
    "inference-header-content-length": _header_length,
    "model": _model,
    "mlserver-model": _model,
    "model-version": _version,
    "mlserver-version": _version,
    "timeout-ms": _timeout,
    "deadline-ms": _deadline,
    "priority": _priority,
    "kafka_replyTopic": _reply_topic,
    "kafka_replyPartition": _reply_partition,
}
