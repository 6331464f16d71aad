"""SIGHUP to `forebay run` on real Kafka: a new version takes over under traffic, a broken one does not."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import yaml

from tests.integration.job import Job, answer, ask, check_once, rows
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import Read, eventually

pytestmark = pytest.mark.timeout(600)  # three starts of a model, one after the other

SHIFT = {"1": 0.0, "2": 1_000.0, "3": 5_000.0}
"""What each version adds to its answers."""


class Traffic:
    """Requests that keep coming, and the configuration file of the worker that answers them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.config = job.folder / "worker.yaml"
        self.sent = 0

    def configure(self, version: str, **options: Any) -> None:
        model = {"version": version, "options": {"by": SHIFT[version], "seconds": 0.002, **options}}
        self.config.write_text(yaml.safe_dump({"model": model}))

    def send(self, count: int) -> None:
        self.job.send(ask(n) for n in range(self.sent, self.sent + count))
        self.sent += count

    def send_until(self, worker: WorkerProcess, event: str) -> dict[str, Any]:
        """Keep sending until the log has an event; return it."""

        def seen() -> bool:
            self.send(20)
            return bool(worker.events(event))

        eventually(seen, f"the log has {event}", 120, 0.3)
        return worker.events(event)[-1]


def version_of(outcome: Read, times: int) -> str:
    """Return the version that a result names, in header and body; fails unless that version gave the answer."""
    assert outcome.value is not None
    version = (outcome.header("model-version") or b"").decode()
    assert json.loads(outcome.value)["model_version"] == version
    expected = rows(int(outcome.key or b"")) * 2 + 1 + times * SHIFT[version]
    np.testing.assert_array_equal(answer(outcome), expected, f"request {outcome.key!r} by version {version}")
    return version


def check_versions(outcomes: list[Read], times: int) -> list[str]:
    """Fail unless each partition's requests went from version to version once; return the versions that answered."""
    by_partition: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for outcome in outcomes:
        _, partition, offset = (outcome.header("source") or b"").decode().rsplit("/", 2)
        by_partition[partition].append((int(offset), version_of(outcome, times)))
    for found in by_partition.values():
        versions = [version for _, version in sorted(found)]
        assert versions == sorted(versions)
    return sorted({version for found in by_partition.values() for _, version in found})


@pytest.mark.parametrize("way", ["at_least_once", "exactly_once, prepared"])
def test_a_new_version_takes_over_under_traffic_and_a_broken_one_does_not(job: Job, way: str) -> None:
    guarantee, _, prepared = way.partition(", ")
    times, model = (2, "ShiftedTwice") if prepared else (1, "Shifted")
    traffic = Traffic(job)
    traffic.configure("1")
    traffic.send(200)
    worker = job.launch(
        ["--config", str(traffic.config)],
        model__factory=f"tests.models:{model}",
        delivery__guarantee=guarantee,
        batch__max_batch_size=8,
        inference__prepare_workers=1 if prepared else 0,
    ).await_ready()
    job.await_answered(100)

    traffic.configure("2")
    worker.signal(signal.SIGHUP)
    reloaded = traffic.send_until(worker, "model_reloaded")
    assert (reloaded["before"], reloaded["version"]) == ("1", "2")
    traffic.send(100)
    traffic.configure("3", fails=True)
    worker.signal(signal.SIGHUP)
    failed = traffic.send_until(worker, "reload_failed")
    assert "this version does not work" in failed["why"]
    assert failed["goes_on"] == "version 2"
    traffic.send(100)
    job.await_settled()

    outcomes = job.outcomes()
    check_once(outcomes, map(str, range(traffic.sent)))
    assert check_versions(outcomes, times) == ["1", "2"]
    assert worker.metric("forebay_reloads_total", outcome="reloaded") == 1
    assert worker.metric("forebay_reloads_total", outcome="failed") == 1
    assert worker.metric("forebay_model_version", version="2") == 1
    assert worker.metric("forebay_rebalances_total") == 1
    assert worker.metric("forebay_replica_restarts_total") == 0
    eventually(lambda: len(worker.replicas()) == (2 if prepared else 1), "the other replicas have left")
    assert worker.stop() == 0


def test_a_worker_that_is_stopped_while_it_loads_drains_and_leaves_nothing(job: Job) -> None:
    traffic = Traffic(job)
    traffic.configure("1")
    worker = job.launch(["--config", str(traffic.config)], model__factory="tests.models:Shifted").await_ready()
    traffic.send(50)
    traffic.configure("2")
    worker.signal(signal.SIGHUP)
    eventually(lambda: len(worker.replicas()) == 2, "the successor is there")
    assert worker.stop() == 0
    job.await_settled()
    check_once(job.outcomes(), map(str, range(50)))
    assert check_versions(job.outcomes(), 1) == ["1"]
    assert not worker.events("model_reloaded")
