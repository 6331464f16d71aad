"""Spans of requests and batches, as an exporter in memory sees them, from the real corridor."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ConfigError
from forebay.records import Headers, Partition
from forebay.testing import MemoryBroker, make_worker, memory_settings
from tests.integration.job import ask, magic
from tests.kafka_probe import Send
from tests.magic import Magic

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from forebay import tracing

ROOT = Path(__file__).resolve().parents[2]
TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736
SAMPLED = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = SAMPLED[:-1] + b"0"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


class Seen:
    """What a run left behind: spans, and the headers of the outcomes by request id."""

    def __init__(self, spans: list[ReadableSpan], outcomes: dict[str, dict[str, bytes | None]]) -> None:
        self.requests = {str(one.attributes["messaging.message.id"]): one for one in spans if _is_request(one)}
        self.batches = [one for one in spans if not _is_request(one)]
        self.outcomes = outcomes
        assert len(self.requests) + len(self.batches) == len(spans), "one span for each request"


def _is_request(span: ReadableSpan) -> bool:
    return span.kind is SpanKind.CONSUMER


def answer(sends: list[Send], values: Mapping[str, Any] | None = None, *, traced: bool = True) -> Seen:
    """Let a worker answer requests."""
    broker = MemoryBroker({"requests": 1, "results": 1, "dead": 1})
    for send in sends:
        broker.append("requests", send.value, send.key, list(send.headers))
    settings = memory_settings({"model.factory": "tests.models:Double", **(values or {})})
    worker, _, _ = make_worker(broker, settings, ROOT)
    exporter = InMemorySpanExporter()
    if traced:
        provider = tracing.provider_of("g")
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        worker._rooms.tracing = worker._observer.tracing = tracing.Tracing(provider, "g")
    worker.run({Partition("requests", 0): len(sends)})
    outcomes = {(one.key or b"").decode(): dict(one.headers) for one in broker.records("results")}
    return Seen(list(exporter.get_finished_spans()), outcomes)


def traced(number: int, parent: bytes = SAMPLED, *more: tuple[str, bytes | None]) -> Send:
    headers: Headers = [("traceparent", parent), *more]
    return ask(number, headers=headers)


def test_a_request_has_one_span_under_its_callers_which_its_result_names() -> None:
    seen = answer([traced(1, SAMPLED, ("tracestate", b"a=1"), ("baggage", b"b=2"))])
    span = seen.requests["1"]
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (TRACE, 0x00F067AA0BA902B7)
    assert span.context.trace_state.get("a") == "1"
    assert span.name == "process requests"
    wanted = {
        "messaging.system": "kafka",
        "messaging.operation.type": "process",
        "messaging.destination.name": "requests",
        "messaging.destination.partition.id": "0",
        "messaging.kafka.offset": 0,
        "messaging.consumer.group.name": "g",
        "forebay.model": "model",
        "forebay.batch.rows": 1,
    }
    assert wanted.items() <= dict(span.attributes or {}).items()
    assert {"forebay.wait_seconds", "forebay.staged_seconds", "forebay.forward_seconds"} <= set(span.attributes or {})
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time <= span.end_time  # type: ignore[operator]
    headers = seen.outcomes["1"]
    assert headers["traceparent"] == b"00-%032x-%016x-01" % (TRACE, span.context.span_id)
    assert (headers["tracestate"], headers["baggage"]) == (b"a=1", b"b=2")


def test_a_batch_has_one_span_that_is_linked_to_those_of_its_requests() -> None:
    seen = answer([traced(n) for n in range(6)], {"batch.max_batch_size": 3, "batch.dispatch": "static"})
    assert len(seen.batches) == 2
    linked = [{link.context.span_id for link in batch.links} for batch in seen.batches]
    assert [len(ids) for ids in linked] == [3, 3]
    assert set.union(*linked) == {span.context.span_id for span in seen.requests.values()}
    assert all(dict(b.attributes or {})["messaging.batch.message_count"] == 3 for b in seen.batches)
    assert all(b.parent is None and b.context.trace_id != TRACE for b in seen.batches)


def test_a_request_that_its_caller_did_not_sample_has_no_span_and_keeps_its_header() -> None:
    seen = answer([traced(1, UNSAMPLED), traced(2)])
    assert seen.requests.keys() == {"2"}
    assert seen.outcomes["1"]["traceparent"] == UNSAMPLED
    assert sum(len(batch.links) for batch in seen.batches) == 1
    assert answer([traced(1, UNSAMPLED)]).batches == []


def test_a_request_without_a_caller_begins_a_trace_if_the_sampler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = answer([ask(1)])
    assert seen.requests["1"].parent is None
    context = seen.requests["1"].context
    assert (seen.outcomes["1"]["traceparent"] or b"")[:-1] == b"00-%032x-%016x-0" % (context.trace_id, context.span_id)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    seen = answer([ask(1), traced(2)])
    assert seen.requests.keys() == {"2"}
    assert "traceparent" not in seen.outcomes["1"]
    assert len(seen.batches) >= 1, "the batch of a sampled request has a span under any sampler"


INVALID = [b"", b"nonsense", b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01", b"ff" + SAMPLED[2:]]


@pytest.mark.parametrize("parent", INVALID)
def test_a_header_that_names_no_caller_begins_a_trace(parent: bytes) -> None:
    seen = answer([traced(1, parent)])
    assert seen.requests["1"].parent is None
    assert (seen.outcomes["1"]["traceparent"] or b"").startswith(b"00-%032x" % seen.requests["1"].context.trace_id)


def test_an_error_is_an_error_in_its_span_with_its_code_whether_it_ran_or_not() -> None:
    bad = Send(b"{", b"bad", [("traceparent", SAMPLED)])
    late = traced(7, SAMPLED, ("deadline-ms", b"1000"))
    raising = magic("raise", Magic.RAISE)
    seen = answer([bad, late, Send(raising.value, raising.key, [("traceparent", SAMPLED)]), traced(1)])
    codes = {"bad": "invalid_payload", "7": "deadline_exceeded", "raise": "model_error"}
    for id, code in codes.items():
        span = seen.requests[id]
        assert (span.status.status_code, (span.attributes or {})["error.type"]) == (StatusCode.ERROR, code)
        assert (span.status.description or "").startswith(code)
        assert (seen.outcomes[id]["traceparent"] or b"").split(b"-")[2] == b"%016x" % span.context.span_id
    assert seen.requests["1"].status.status_code is StatusCode.UNSET
    assert "forebay.batch.number" in (seen.requests["raise"].attributes or {})
    assert "forebay.batch.number" not in (seen.requests["bad"].attributes or {})


def test_refused_requests_with_equal_headers_do_not_share_a_span() -> None:
    seen = answer([Send(b"{", b"a"), Send(b"{", b"b")])
    assert len({headers["traceparent"] for headers in seen.outcomes.values()}) == 2


def test_without_tracing_the_header_is_carried_unchanged() -> None:
    assert answer([traced(1)], traced=False).outcomes["1"]["traceparent"] == SAMPLED


@pytest.mark.parametrize(
    ("setting", "environment", "wanted"),
    [
        (None, {}, False),
        (True, {}, True),
        (False, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, False),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
        (None, {"OTEL_TRACES_EXPORTER": "console"}, True),
        (None, {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, False),
        (None, {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, False),
    ],
)
def test_tracing_is_on_where_the_setting_or_else_the_environment_says_so(
    setting: bool | None, environment: dict[str, str], wanted: bool
) -> None:
    assert tracing.is_wanted(setting, environment) is wanted


@pytest.fixture
def without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refusing(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refusing)
    monkeypatch.setattr(tracing, "entry_points", lambda **_: [])


@pytest.mark.usefixtures("without_opentelemetry")
def test_one_sentence_says_what_to_install_where_the_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = memory_settings({"model.factory": "tests.models:Double", "ops.tracing": True})
    with pytest.raises(ConfigError, match=r"pip install 'forebay\[otel\]'") as caught:
        tracing.start(settings)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert tracing.start(memory_settings({"model.factory": "tests.models:Double"})) is None, "only a warning"


def test_an_exporter_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "carrier-pigeon")
    settings = memory_settings({"model.factory": "tests.models:Double", "ops.tracing": True})
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        tracing.start(settings)
