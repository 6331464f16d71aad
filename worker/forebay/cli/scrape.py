"""Readings of workers' `/metrics`, and what two of them say: rates, quantiles, levels. For `forebay top`."""

from __future__ import annotations

import math
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import UsageError

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """Every sample of one scrape, by name and labels. `error` is why there is none."""

    url: str
    at: float
    samples: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    error: str | None = None

    def total(self, name: str, **labels: str) -> float:
        """Add up the samples of that name with those labels."""
        wanted = set(labels.items())
        return sum(value for found, value in self.samples.get(name, {}).items() if wanted <= set(found))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Add up the samples of that name by one label."""
        sums: dict[str, float] = defaultdict(float)
        for found, value in self.samples.get(name, {}).items():
            sums[dict(found).get(label, "")] += value
        return dict(sums)


def scrape(url: str, timeout: float = 2.0) -> Reading:
    """Read a worker's metrics. `url` may leave out the scheme and `/metrics`."""
    address = url if "://" in url else f"http://{url}"
    if not address.startswith(("http://", "https://")):
        raise UsageError(f"--url takes an http address such as http://127.0.0.1:8080, not {url!r}")
    if not address.rstrip("/").endswith("/metrics"):
        address = address.rstrip("/") + "/metrics"
    try:
        with urllib.request.urlopen(address, timeout=timeout) as answer:
            text = answer.read().decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return Reading(url, time.monotonic(), error=str(getattr(reason, "strerror", None) or reason))
    return Reading(url, time.monotonic(), parse(text))


def parse(text: str) -> dict[str, dict[Labels, float]]:
    """Read the Prometheus text format."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, dict[Labels, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return dict(samples)


def rate(before: Reading, after: Reading, name: str, **labels: str) -> float:
    """Give a counter's increase per second; a counter that fell was restarted and counts from zero."""
    seconds = after.at - before.at
    if seconds <= 0:
        return 0.0
    return _grown(before.total(name, **labels), after.total(name, **labels)) / seconds


def increase(before: Reading, after: Reading, name: str, label: str) -> dict[str, float]:
    """Give a counter's increase by one label, largest first; what did not grow is left out."""
    old, new = before.by(name, label), after.by(name, label)
    grown = {key: _grown(old.get(key, 0.0), value) for key, value in new.items()}
    return dict(sorted(((key, value) for key, value in grown.items() if value), key=lambda pair: -pair[1]))


def mean(before: Reading, after: Reading, histogram: str) -> float | None:
    """Give the mean of what a histogram observed between two readings, None if that was nothing."""
    count = _grown(before.total(f"{histogram}_count"), after.total(f"{histogram}_count"))
    total = _grown(before.total(f"{histogram}_sum"), after.total(f"{histogram}_sum"))
    return total / count if count else None


def quantile(before: Reading, after: Reading, histogram: str, q: float) -> float | None:
    """Estimate a quantile of what a histogram observed between two readings, linear within its bucket."""
    old, new = before.by(f"{histogram}_bucket", "le"), after.by(f"{histogram}_bucket", "le")
    buckets = sorted((math.inf if le == "+Inf" else float(le), _grown(old.get(le, 0.0), new[le])) for le in new)
    if not buckets or not buckets[-1][1]:
        return None
    rank = q * buckets[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below) if count > below else bound
        lower, below = bound, count
    return lower


def overview(before: Reading, after: Reading) -> dict[str, Any]:
    """Give what `forebay top` shows of a worker; milliseconds, bytes, records."""
    if after.error or before.error:
        return {"url": after.url, "error": after.error or before.error}
    duration = "forebay_request_duration_seconds"
    outcomes = increase(before, after, "forebay_requests_total", "outcome")
    seconds = max(after.at - before.at, 1e-9)
    memory = after.by("forebay_replica_memory_bytes", "kind")
    steps, rows = (rate(before, after, f"forebay_{name}_total") for name in ("steps", "step_rows"))
    return {
        "url": after.url,
        "requests_per_second": rate(before, after, "forebay_requests_total"),
        "errors_per_second": sum(count for name, count in outcomes.items() if name != "ok") / seconds,
        "outcomes": outcomes,
        "p50_ms": _milliseconds(quantile(before, after, duration, 0.5)),
        "p99_ms": _milliseconds(quantile(before, after, duration, 0.99)),
        "queue_p99_ms": _milliseconds(quantile(before, after, "forebay_queue_seconds", 0.99)),
        "batch_size": rows / steps if steps else mean(before, after, "forebay_batch_size"),
        "steps_per_second": steps,
        "cuts": increase(before, after, "forebay_batch_cuts_total", "reason"),
        "queue_requests": after.total("forebay_queue_requests"),
        "queue_bytes": after.total("forebay_queue_bytes"),
        "in_flight": after.total("forebay_in_flight_requests"),
        "unacknowledged": after.total("forebay_unacknowledged_outcomes"),
        "lag": after.total("forebay_partition_lag_records"),
        "partitions": after.total("forebay_partitions_assigned"),
        "paused": bool(after.total("forebay_paused")),
        "replicas_ready": after.total("forebay_replicas_ready"),
        "replica_restarts": after.total("forebay_replica_restarts_total"),
        "dead_letters": after.total("forebay_dead_letters_total"),
        "resident_bytes": after.total("process_resident_memory_bytes"),
        "replica_memory_bytes": memory,
    }


def _grown(old: float, new: float) -> float:
    return new - old if new >= old else new


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
