"""Spans of `forebay run` on a real Kafka, as a collector on loopback gets them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.integration.job import Job, ask, check_once, magic
from tests.kafka_probe import Send, eventually
from tests.magic import Magic

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs the extra otel")

TRACE, CALLER = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
PARENT = b"00-" + TRACE + b"-" + CALLER + b"-01"


class Collector:
    """Takes OTLP over HTTP and keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Port(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(body)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Port)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, body: bytes) -> None:
        for resource in service.ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    yield made
    made.close()


def test_every_sampled_request_of_a_worker_has_its_span_at_the_collector_when_it_has_ended(
    job: Job, collector: Collector
) -> None:
    failing = magic("raise", Magic.RAISE)
    job.send(ask(n, headers=[("traceparent", PARENT[:-1] + b"0")]) for n in range(100, 105))
    job.send([*(ask(n, headers=[("traceparent", PARENT)]) for n in range(20))])
    job.send([Send(failing.value, failing.key, [("traceparent", PARENT)])])
    worker = job.start(batch__max_batch_size=8)
    outcomes = job.await_settled()
    assert worker.stop() == 0
    check_once(outcomes, [*map(str, range(20)), *map(str, range(100, 105)), "raise"])

    eventually(lambda: len(collector.spans) >= 22, "the spans have arrived", 10)
    requests = {span.span_id.hex().encode(): span for span in collector.spans if span.name.startswith("process ")}
    batches = [span for span in collector.spans if span.name.startswith("batch ")]
    assert len(requests) == 21
    assert all(
        (one.trace_id.hex().encode(), one.parent_span_id.hex().encode()) == (TRACE, CALLER) for one in requests.values()
    )
    named = {(one.header("traceparent") or b"").split(b"-")[2]: one.key for one in outcomes}
    assert requests.keys() <= named.keys()
    assert {named[id] for id in requests} == {b"raise", *(b"%d" % n for n in range(20))}
    linked = [link.span_id.hex().encode() for batch in batches for link in batch.links]
    assert sorted(linked) == sorted(requests)
    failed = [span for span in requests.values() if span.status.code == 2]
    assert [span.status.message.partition(":")[0] for span in failed] == ["model_error"]
    assert collector.services == {"forebay"}


def test_a_collector_that_is_not_there_costs_no_answer_and_ends_in_time(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    job.send(ask(n) for n in range(20))
    worker = job.run_to_end()
    check_once(job.outcomes(), map(str, range(20)))
    assert worker.events("tracing")
