"""What two readings of a worker's metrics say."""

from __future__ import annotations

import io
import math
import os

import pytest
from prometheus_client import generate_latest
from rich.console import Console

from forebay.cli.scrape import Reading, increase, mean, overview, parse, quantile, rate, scrape
from forebay.cli.top import _compact, _configured, render, short_names
from forebay.errors import UsageError
from forebay.metrics import Metrics


def reading(metrics: Metrics, at: float) -> Reading:
    return Reading("w:8080", at, parse(generate_latest(metrics.registry).decode()))


def busy_second() -> tuple[Reading, Reading]:
    """A worker's readings one second apart, in which it answered 90 requests well and 10 badly, in 25 batches."""
    metrics = Metrics()
    metrics.requests.labels("m", "ok").inc(7)
    metrics.request_duration.observe("m", [10.0] * 7)
    before = reading(metrics, 100.0)
    metrics.requests.labels("m", "ok").inc(90)
    metrics.requests.labels("m", "model_error").inc(10)
    metrics.request_duration.observe("m", [0.003] * 90 + [0.1] * 10)
    for size in [4] * 25:
        metrics.batch_size.labels("m").observe(size)
    metrics.cuts.labels("m", "idle").inc(5)
    metrics.cuts.labels("m", "full_rows").inc(20)
    metrics.lag.labels("t", "0").set(30)
    metrics.lag.labels("t", "1").set(12)
    metrics.paused.set(1)
    return before, reading(metrics, 101.0)


def test_every_metric_that_top_reads_is_one_that_the_worker_exports() -> None:
    metrics = Metrics()
    metrics.request_duration.observe("m", [1.0])
    metrics.queue_duration.observe("m", [1.0])
    metrics.batch_size.labels("m").observe(1)
    metrics.requests.labels("m", "ok").inc()
    metrics.cuts.labels("m", "idle").inc()
    metrics.steps.labels("m").inc()
    metrics.step_rows.labels("m").inc()
    metrics.dead_letters.labels("x").inc()
    metrics.lag.labels("t", "0").set(1)
    metrics.replica_memory.labels("0", "resident").set(1)
    asked: set[str] = set()

    class Spy(dict):  # type: ignore[type-arg]
        def get(self, name: str, default: object = None) -> object:
            asked.add(name)
            return super().get(name, default)

    samples = parse(generate_latest(metrics.registry).decode())
    overview(Reading("w", 0.0, Spy(samples)), Reading("w", 1.0, Spy(samples)))
    assert asked <= set(samples), f"not exported: {asked - set(samples)}"
    assert len(asked) > 15


def test_rates_and_quantiles_come_from_what_happened_between_two_readings() -> None:
    view = overview(*busy_second())
    assert view["requests_per_second"] == 100
    assert view["errors_per_second"] == 10
    assert view["batch_size"] == 4
    assert view["cuts"] == {"full_rows": 20, "idle": 5}
    assert view["lag"] == 42
    assert view["paused"] is True
    assert 2 < view["p50_ms"] <= 4
    assert 64 < view["p99_ms"] <= 128


def test_of_a_model_that_runs_in_steps_the_batch_is_the_rows_of_a_step() -> None:
    metrics = Metrics()
    metrics.steps.labels("m").inc(10)
    metrics.step_rows.labels("m").inc(70)
    before = reading(metrics, 100.0)
    metrics.steps.labels("m").inc(200)
    metrics.step_rows.labels("m").inc(1_500)
    view = overview(before, reading(metrics, 102.0))
    assert (view["steps_per_second"], view["batch_size"]) == (100, 7.5)
    out = io.StringIO()
    Console(file=out, width=80).print(render([view], "forebay top"))
    assert "100 steps/s of 7.5 rows" in out.getvalue()


def test_a_quiet_worker_has_no_latency() -> None:
    before, _ = busy_second()
    still = Reading(before.url, before.at + 1, before.samples)
    assert quantile(before, still, "forebay_request_duration_seconds", 0.5) is None
    assert mean(before, still, "forebay_batch_size") is None
    assert rate(before, still, "forebay_requests_total") == 0
    assert increase(before, still, "forebay_requests_total", "outcome") == {}


def test_a_counter_that_fell_was_restarted() -> None:
    before = Reading("w", 0.0, {"c": {(("l", "a"),): 100.0}})
    after = Reading("w", 2.0, {"c": {(("l", "a"),): 10.0}})
    assert rate(before, after, "c") == 5.0


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    buckets = {(("le", "1.0"),): 1.0, (("le", "+Inf"),): 10.0}
    found = quantile(Reading("w", 0.0), Reading("w", 1.0, {"h_bucket": buckets}), "h", 0.99)
    assert found == 1.0
    assert not math.isinf(found)


def test_the_view_names_workers_that_do_not_answer() -> None:
    views = [overview(*busy_second()), {"url": "gone:1", "error": "Connection refused"}, overview(*busy_second())]
    out = io.StringIO()
    Console(file=out, width=80).print(render(views, "forebay top: 3 workers"))
    text = out.getvalue()
    assert "gone:1" in text
    assert "Connection refused" in text
    assert "2 workers" in text
    assert "batches cut because: full 80%, replica idle 20%" in text
    assert "errors: model_error 10" in text
    assert "…" not in text


def test_an_address_where_nothing_listens_is_a_reading_with_its_reason() -> None:
    assert "refused" in (scrape("127.0.0.1:1").error or "")
    with pytest.raises(UsageError, match="http address"):
        scrape("file:///etc/passwd")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (3.25, "3.2"), (64, "64"), (999.6, "1000"), (9_999, "9999"), (12_345, "12.3k"), (1_234_567, "1.2M")],
)
def test_numbers_stay_short(value: float, shown: str) -> None:
    assert _compact(value) == shown


CLUSTER = "http://worker-{}.forebay-workers.production.svc.cluster.local:8080"


@pytest.mark.parametrize(
    ("urls", "names"),
    [
        (["http://127.0.0.1:8080", "127.0.0.1:8081/"], ["127.0.0.1:8080", "127.0.0.1:8081"]),
        ([CLUSTER.format(0), CLUSTER.format(1)], ["worker-0", "worker-1"]),
        ([CLUSTER.format(0), CLUSTER.format(0)], ["worker-0", "worker-0"]),
        ([CLUSTER.format(0), "http://b:8080"], [CLUSTER.format(0)[7:-5], "b"]),
        ([CLUSTER.format(0)], [CLUSTER.format(0)[7:]]),
    ],
)
def test_long_addresses_lose_what_they_have_in_common(urls: list[str], names: list[str]) -> None:
    assert short_names(urls) == names


def test_no_number_is_squeezed_by_long_addresses() -> None:
    """At 80 columns the names of a cluster's workers left a dot of each number."""
    views = [overview(*busy_second()) | {"url": f"http://{letter * 70}:1"} for letter in "ab"]
    out = io.StringIO()
    Console(file=out, width=80).print(render(views, "forebay top: 2 workers"))
    assert "…" not in out.getvalue()
    assert "in" in out.getvalue().split()


def test_top_without_an_address_takes_that_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)
    assert _configured(None, ["ops.port=1234"]) == "127.0.0.1:1234"
    assert _configured(None, ["ops.host='::'", "ops.port=7"]) == "[::1]:7"
    assert _configured(None, ["ops.host=0.0.0.0"]) == "127.0.0.1:8080"
    with pytest.raises(UsageError, match="its log tells ops_url"):
        _configured(None, ["ops.port=0"])
