"""Health and metrics as an orchestrator sees them: status, reasons, and the names that others rely on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.health import STALLED_AFTER_SECONDS, Health, answer
from forebay.metrics import Latency, Metrics
from forebay.records import Partition
from forebay.testing import ManualClock


class Scene:
    def __init__(self, phase: str = "serving") -> None:
        self.clock = ManualClock()
        self.health = Health(self.clock)
        self.metrics = Metrics()
        self.health.phase = phase
        self.health.models["m"] = True

    def ask(self, path: str) -> tuple[int, Any]:
        status, kind, body = answer(path, self.health, self.metrics.registry)
        assert kind == "application/json"
        return status, json.loads(body)


@pytest.mark.parametrize("path", ["/livez", "/v2/health/live"])
def test_a_worker_is_live_while_its_loop_comes_round(path: str) -> None:
    scene = Scene("starting")
    assert scene.ask(path) == (200, {"live": True, "reasons": {}})
    scene.clock.advance(STALLED_AFTER_SECONDS + 5)
    status, body = scene.ask(path)
    assert (status, body["live"]) == (503, False)
    assert "35 s" in body["reasons"]["loop"]
    scene.health.beat(scene.clock.now)
    assert scene.ask(path)[0] == 200


@pytest.mark.parametrize("path", ["/readyz", "/v2/health/ready"])
def test_a_worker_is_ready_while_it_serves(path: str) -> None:
    scene = Scene()
    assert scene.ask(path) == (200, {"ready": True, "reasons": {}})
    for phase in ("starting", "draining", "stopped"):
        scene.health.phase = phase
        status, body = scene.ask(path)
        assert status == 503
        assert phase in body["reasons"]["phase"]


def test_trouble_makes_a_worker_unready_and_leaves_it_live() -> None:
    scene = Scene()
    scene.health.trouble("delivery", "results: timed out")
    assert scene.ask("/readyz") == (503, {"ready": False, "reasons": {"delivery": "results: timed out"}})
    assert scene.ask("/livez")[0] == 200
    scene.health.trouble("delivery", None)
    scene.health.trouble("delivery", None)
    assert scene.ask("/readyz")[0] == 200


def test_a_loop_that_stands_still_is_not_ready_either() -> None:
    scene = Scene()
    scene.clock.advance(STALLED_AFTER_SECONDS + 1)
    assert "loop" in scene.ask("/readyz")[1]["reasons"]


def test_a_start_is_over_once_the_group_was_joined() -> None:
    scene = Scene("starting")
    assert scene.ask("/startupz")[0] == 503
    for phase in ("serving", "draining"):
        scene.health.phase = phase
        assert scene.ask("/startupz")[0] == 200


@pytest.mark.parametrize("path", ["/v2/models/m/ready", "/v2/models/m/versions/1/ready"])
def test_a_model_is_ready_while_a_replica_of_it_is(path: str) -> None:
    scene = Scene()
    assert scene.ask(path) == (200, {"name": "m", "ready": True, "reasons": {}})
    scene.health.models["m"] = False
    assert scene.ask(path)[0] == 503
    assert "model m" in scene.ask("/readyz")[1]["reasons"]


def test_a_model_without_replicas_does_not_make_another_model_unready() -> None:
    scene = Scene()
    scene.health.models["other"] = False
    assert scene.ask("/v2/models/m/ready")[0] == 200
    assert scene.ask("/v2/models/other/ready")[0] == 503


def test_a_model_that_is_not_served_is_not_found() -> None:
    status, body = Scene().ask("/v2/models/nobody/ready")
    assert status == 404
    assert "nobody" in body["error"]
    assert "m" in body["error"]


@pytest.mark.parametrize("path", ["/", "/metricsz", "/v2/models/m", "/v2/health", "//", "/v2/models//ready"])
def test_any_other_path_is_not_found(path: str) -> None:
    assert Scene().ask(path)[0] == 404


# ---------------------------------------------------------------------- metrics


def samples(metrics: Metrics) -> dict[str, float]:
    status, kind, body = answer("/metrics", Health(), metrics.registry)
    assert status == 200
    assert kind.startswith("text/plain")
    return {
        f"{sample.name}{dict(sorted(sample.labels.items())) or ''}": sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_metrics_are_readable_and_carry_the_prefix() -> None:
    found = samples(Metrics())
    own = [name for name in found if not name.startswith("process_")]
    assert own
    assert all(name.startswith("forebay_") for name in own)


def test_latencies_are_counted_in_buckets_that_add_up() -> None:
    metrics = Metrics()
    metrics.request_duration.observe("m", [0.0004, 0.0005, 0.003, 100.0])
    metrics.request_duration.observe("m", [0.003])
    found = samples(metrics)
    name = "forebay_request_duration_seconds"
    buckets = {
        key.split("'le': '")[1].split("'")[0]: value for key, value in found.items() if key.startswith(f"{name}_bucket")
    }
    assert buckets["0.0005"] == 2
    assert buckets["0.004"] == 4
    assert buckets["64.0"] == 4
    assert buckets["+Inf"] == 5
    assert list(buckets.values()) == sorted(buckets.values())
    assert found[f"{name}_count{{'model': 'm'}}"] == 5
    assert found[f"{name}_sum{{'model': 'm'}}"] == pytest.approx(100.0069)


def test_registering_a_latency_collects_nothing() -> None:
    metrics = Metrics()
    latency = Latency("forebay_extra_seconds", "Extra.", metrics.registry)
    assert not [name for name in samples(metrics) if "extra" in name]
    latency.observe("m", [])
    assert samples(metrics)["forebay_extra_seconds_count{'model': 'm'}"] == 0


def test_gauges_of_a_partition_go_with_it() -> None:
    metrics = Metrics()
    for partition in ("0", "1"):
        metrics.lag.labels("t", partition).set(5)
        metrics.committed.labels("t", partition).set(5)
    metrics.forget([Partition("t", 0), Partition("t", 7)])
    left = [name for name in samples(metrics) if "partition" in name and "'topic'" in name]
    assert left
    assert all("'partition': '1'" in name for name in left)


def test_two_workers_in_one_process_share_no_metric() -> None:
    first, second = Metrics(), Metrics()
    first.rebalances.labels("assigned").inc()
    assert second.registry.get_sample_value("forebay_rebalances_total", {"kind": "assigned"}) is None
