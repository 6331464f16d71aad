"""What a span costs the loop: `.venv/bin/python -m bench.tracing` prints CPU microseconds per request of a batch.

One thread's CPU time, so that a busy machine disturbs it little; the exporter throws the spans away on its own thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from forebay.inference.matching import Finished
from forebay.records import Batch, Encoding, Reason, Record, Request, Timings
from forebay.tracing import Tracing, provider_of

ROWS, ROUNDS = 256, 20
PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0"


class Nowhere(SpanExporter):
    """An exporter that drops what it gets."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def microseconds(tracing: Tracing, flag: bytes) -> float:
    """Return what `finished` takes per request, the best of some rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        requests = [
            Request(
                Record("requests", 0, number, None, b"x" * 256, [], 1), str(number), "model", 1, [], [], Encoding.JSON,
                "lane", 4, echo=[("traceparent", PARENT + flag)],
            )
            for number in range(ROWS)
        ]  # fmt: skip
        batch = Batch(1, "model", requests, ROWS, Reason.IDLE, 1.0)
        finished = Finished(batch, [(requests, [])], [], Timings(total=0.01))
        began = time.thread_time()
        tracing.finished(finished, 2.0)
        best = min(best, time.thread_time() - began)
    return best / ROWS * 1e6


def main() -> None:
    """Print both costs."""
    provider = provider_of("bench")
    provider.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=4 * ROWS * ROUNDS))
    tracing = Tracing(provider, "bench")
    print(f"sampled {microseconds(tracing, b'1'):.1f} µs, unsampled {microseconds(tracing, b'0'):.2f} µs per request")
    tracing.close()


if __name__ == "__main__":
    main()
