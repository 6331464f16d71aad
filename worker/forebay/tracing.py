"""Traces: one span per request, one per batch, as OpenTelemetry has them. The only place that knows OpenTelemetry.

The loop's thread makes a request's span when its batch is back, from times that are known anyway, so a request costs
nothing before; a thread of the exporter's own sends them. Imported only where tracing is on. It knows no Kafka client.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from forebay import __version__
from forebay.errors import ConfigError
from forebay.logs import logger
from forebay.records import Failure, Headers, Record, Request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, SpanContext

    from forebay.inference.matching import Finished
    from forebay.settings import Settings
    from forebay.stream.codec import Refusal

FLUSH_SECONDS = 5.0
"""What the end of the worker may wait for spans that are not sent yet."""

_ASKED_BY = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
_MEND = "tracing needs OpenTelemetry: pip install 'forebay[otel]', or set ops.tracing to false"
_LINKS = 10_000
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_UNSAMPLED = frozenset(b"02468ace")
_log = logger("tracing")


def is_wanted(wanted: bool | None, environment: Mapping[str, str]) -> bool:
    """Whether to trace: as the setting says, and where it says nothing, as OpenTelemetry's own variables do."""
    if wanted is not None:
        return wanted
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(environment.get(name) for name in _ASKED_BY)


def start(settings: Settings) -> Tracing | None:
    """Return what traces under these settings and the OTEL_ variables, None where nobody asked for it.

    Raises ConfigError where the setting asks for what is not installed; where only the environment does, a warning says
    so: that is often set for a whole cluster.
    """
    if not is_wanted(settings.ops.tracing, os.environ):
        return None
    try:
        exporters = _exporters(os.environ)
        provider = provider_of(settings.kafka.group_id)
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except (ImportError, ConfigError) as error:
        why = str(error) if isinstance(error, ConfigError) else _MEND
        if settings.ops.tracing:
            raise ConfigError(why) from error
        _log.warning("tracing_off", why=why)
        return None
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    _log.info("tracing", exporters=[type(exporter).__name__ for exporter in exporters])
    return Tracing(provider, settings.kafka.group_id)


def provider_of(group_id: str) -> TracerProvider:
    """Return a provider for this worker; sampling and resource attributes come from the OTEL_ variables."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider

    attributes: dict[str, str] = {"service.version": __version__, "messaging.consumer.group.name": group_id}
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not named:
        attributes["service.name"] = "forebay"
    limits = SpanLimits() if os.environ.get("OTEL_SPAN_LINK_COUNT_LIMIT") else SpanLimits(max_links=_LINKS)
    return TracerProvider(resource=Resource.create(attributes), span_limits=limits, shutdown_on_exit=False)


def _exporters(environment: Mapping[str, str]) -> list[SpanExporter]:
    """Make the exporters that OTEL_TRACES_EXPORTER names, OTLP where it names none; they read their own variables."""
    names = [name.strip() for name in environment.get("OTEL_TRACES_EXPORTER", "otlp").split(",") if name.strip()]
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    made: list[SpanExporter] = []
    for name in names:
        wanted = name
        if name == "otlp":
            wanted = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
        found = list(entry_points(group="opentelemetry_traces_exporter", name=wanted))
        if not found:
            raise ConfigError(_mend(wanted))
        made.append(found[0].load()())
    return made


def _mend(exporter: str) -> str:
    """Say what to do about an exporter that no installed package has."""
    if exporter == "otlp_proto_http":
        return _MEND
    if exporter == "otlp_proto_grpc":
        return (
            "OTEL_EXPORTER_OTLP_PROTOCOL is grpc, and what sends that is not installed: set it to http/protobuf, with "
            "the collector's port for HTTP (mostly 4318), or pip install opentelemetry-exporter-otlp-proto-grpc"
        )
    if exporter == "none":
        return "ops.tracing is true and OTEL_TRACES_EXPORTER is none: remove one of them"
    return (
        f"no installed package has the trace exporter {exporter!r} that OTEL_TRACES_EXPORTER names: "
        "set it to otlp or console, or leave it out"
    )


@dataclass(slots=True)
class _Way:
    """What the spans of requests that ended together have in common, and the contexts of those that were made.

    `now` and `cut_at` are on the worker's clock; `cut_at` None: they were in no batch.
    """

    attributes: dict[str, Any]
    now: float
    cut_at: float | None = None
    contexts: list[SpanContext] = field(default_factory=list)


class Tracing:
    """Makes the spans of one worker.

    A request's span is a child of its `traceparent`; one whose caller did not sample it has none. The `traceparent` of
    the outcome names the span then.
    """

    def __init__(self, provider: TracerProvider, group_id: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        self._api = trace
        self._provider = provider
        self._group = group_id
        self._tracer = provider.get_tracer("forebay", __version__)
        # A batch is worth a span as soon as one of its requests is, whatever is sampled of what has no parent.
        batches = TracerProvider(
            sampler=ALWAYS_ON, resource=provider.resource, span_limits=provider._span_limits, shutdown_on_exit=False,
            active_span_processor=provider._active_span_processor,
        )  # fmt: skip
        self._batches = batches.get_tracer("forebay", __version__)

    def finished(self, finished: Finished, now: float) -> None:
        """Make the spans of a batch that came back, before its outcomes are encoded. `now` is on the worker's clock."""
        batch, timings = finished.batch, finished.timings
        attributes: dict[str, Any] = {
            "forebay.model": batch.model,
            "forebay.batch.number": batch.number,
            "forebay.batch.rows": batch.rows,
            "forebay.batch.reason": batch.reason.value,
            "forebay.staged_seconds": max(now - batch.cut_at - timings.total, 0.0),
            "forebay.stage_seconds": timings.stage,
            "forebay.forward_seconds": timings.forward,
        }
        way = _Way(attributes, now, batch.cut_at)
        for requests, _ in finished.results:
            for request in requests:
                self._request(request, None, way)
        for request, failure in finished.failures:
            self._request(request, failure, way)
        if way.contexts and timings.total:
            self._batch(finished, way)

    def refused(self, request: Request | Refusal, failure: Failure, now: float) -> None:
        """Make the span of a request that ends in an error without a batch, before the error is encoded."""
        self._request(request, failure, _Way({"forebay.model": request.model}, now))

    def close(self) -> None:
        """Send what is not sent yet, for a bounded time, and end the exporters."""
        flushing = threading.Thread(target=self._provider.shutdown, name="forebay-spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        if flushing.is_alive():
            _log.warning("spans_not_sent", seconds=FLUSH_SECONDS)

    def _request(self, request: Request | Refusal, failure: Failure | None, way: _Way) -> None:
        """Make one request's span, and let its outcome name it, unless it is not sampled."""
        parent = next((value for name, value in request.echo if name == "traceparent"), None)
        if parent is not None and len(parent) >= 55 and parent[54] in _UNSAMPLED:
            return
        record = request.record
        span = self._tracer.start_span(
            f"process {record.topic}",
            self._context_of(parent, request.echo),
            self._api.SpanKind.CONSUMER,
            start_time=_wall(request.arrived, way.now),
        )
        if not span.is_recording():
            return
        attributes = way.attributes | _messaging(record, request.id, self._group)
        if way.cut_at is not None:
            attributes["forebay.wait_seconds"] = max(way.cut_at - request.arrived, 0.0)
        if request.attempts:
            attributes["forebay.attempts"] = request.attempts + 1
        span.set_attributes(attributes)
        if failure is not None:
            self._failed(span, failure)
        span.end()
        context = span.get_span_context()
        way.contexts.append(context)
        named = b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags)
        request.echo = [*(pair for pair in request.echo if pair[0] != "traceparent"), ("traceparent", named)]

    def _batch(self, finished: Finished, way: _Way) -> None:
        batch, failures = finished.batch, finished.failures
        attributes = {
            **way.attributes,
            "messaging.batch.message_count": len(batch.requests),
            "forebay.executions": finished.timings.executions,
            "forebay.failures": len(failures),
        }
        span = self._batches.start_span(
            f"batch {batch.model}",
            self._context_of(None, ()),
            attributes=attributes,
            links=[self._api.Link(context) for context in way.contexts],
            start_time=_wall(batch.cut_at, way.now),
        )
        if failures and not finished.results:
            self._failed(span, failures[0][1])
        span.end()

    def _failed(self, span: Span, failure: Failure) -> None:
        span.set_attribute("error.type", failure.code.value)
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, f"{failure.code.value}: {failure.message[:200]}"))

    def _context_of(self, parent: bytes | None, echo: Headers | tuple[()]) -> Any:
        """Return the context that a caller's headers name; a new trace where they name none that is valid."""
        from opentelemetry.context import Context

        found = _PARENT.fullmatch(parent or b"")
        if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5]):
            return Context()
        api = self._api
        state = b",".join(value for name, value in echo if name == "tracestate" and value).decode(errors="replace")
        context = api.SpanContext(
            int(found[2], 16),
            int(found[3], 16),
            is_remote=True,
            trace_flags=api.TraceFlags(int(found[4], 16)),
            trace_state=api.TraceState.from_header([state]) if state else None,
        )
        return api.set_span_in_context(api.NonRecordingSpan(context), Context()) if context.is_valid else Context()


def _messaging(record: Record, id: str, group_id: str) -> dict[str, Any]:
    """Return what the semantic conventions of messaging want to know of a record."""
    return {
        "messaging.system": "kafka",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": record.topic,
        "messaging.destination.partition.id": str(record.partition),
        "messaging.kafka.offset": record.offset,
        "messaging.consumer.group.name": group_id,
        "messaging.message.id": id,
        "messaging.message.body.size": len(record.value or b""),
    }


def _wall(moment: float, now: float) -> int:
    """Turn a moment on the worker's clock into nanoseconds of the wall clock."""
    return time.time_ns() - int(max(now - moment, 0.0) * 1e9)
