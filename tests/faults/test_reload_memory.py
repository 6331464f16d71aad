"""Twenty reloads of a model under traffic: memory, descriptors, threads and processes stay what the first one left."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from tests.integration.job import Job, ask, check_once
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import eventually

RELOADS, ROUND = 20, 200


@dataclass
class Sample:
    """What a worker and its replica hold; `segments` are the shared-memory files of the staging slots."""

    worker_bytes: int
    replica_bytes: int
    descriptors: int
    segments: int
    threads: int


def sample(worker: WorkerProcess) -> Sample:
    """Return what a worker holds now."""
    loop = psutil.Process(worker.process.pid)
    replicas = worker.replicas()
    links: list[str] = []
    for link in Path(f"/proc/{loop.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            links.append(os.readlink(link))
    return Sample(
        loop.memory_info().rss,
        sum(replica.memory_info().rss for replica in replicas),
        len(links),
        sum("forebay-staging" in link for link in links),
        loop.num_threads(),
    )


@pytest.mark.long
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("executor", ["process", "thread"])
def test_twenty_reloads_leave_nothing_behind(job: Job, executor: str) -> None:
    config = job.folder / "worker.yaml"

    def configure(version: int) -> None:
        options = {"by": float(version)}
        config.write_text(yaml.safe_dump({"model": {"version": str(version), "options": options}}))

    configure(1)
    worker = job.launch(
        ["--config", str(config)], model__factory="tests.models:Shifted", inference__executor=executor
    ).await_ready()
    processes, before = len(worker.replicas()), sample(worker)
    found: list[Sample] = []
    for reload in range(1, RELOADS + 2):
        sent = (reload - 1) * ROUND
        job.send(ask(n) for n in range(sent, sent + ROUND))
        configure(reload + 1)
        worker.signal(signal.SIGHUP)
        eventually(lambda seen=reload: len(worker.events("model_reloaded")) == seen, f"reload {reload}", 180, 0.1)  # type: ignore[misc]
        job.await_answered(sent + ROUND)
        eventually(lambda: len(worker.replicas()) == processes, "the old replica has left")
        eventually(lambda: sample(worker).segments == before.segments, "its shared memory is given back")
        found.append(sample(worker))
        print(reload, found[-1])

    job.await_settled()
    check_once(job.outcomes(), map(str, range((RELOADS + 1) * ROUND)))
    first, last = found[0], found[-1]
    assert last.worker_bytes <= 1.05 * first.worker_bytes
    assert last.replica_bytes <= 1.05 * first.replica_bytes
    assert last.threads == first.threads
    assert last.descriptors <= first.descriptors + 2  # the clients' connections come and go
    assert worker.metric("forebay_reloads_total", outcome="reloaded") == RELOADS + 1
    assert worker.metric("forebay_replica_restarts_total") == 0
    assert worker.metric("forebay_rebalances_total") == 1
    assert worker.stop() == 0
