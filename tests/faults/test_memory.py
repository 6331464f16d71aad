"""Memory: what the parent process holds is bounded by the declared queue limits, whatever the backlog."""

from __future__ import annotations

import json
import threading

import pytest

from tests.integration.job import Job, check_once
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import Send
from tests.models import WIDE

pytestmark = pytest.mark.usefixtures("plain_python")

MIB = 1024 * 1024
PARENT = 150 * MIB


class Watch:
    """The highest resident size of a worker's parent process, seen while the block runs."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.highest = 0

    def _look(self) -> None:
        while not self._end.wait(0.05) and self._worker.process.poll() is None:
            self.highest = max(self.highest, self._worker.parent_rss())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def photo(number: int) -> Send:
    """Return a request of 175 KB."""
    parameters = {"binary_data_size": WIDE}
    tensor = {"name": "image", "datatype": "UINT8", "shape": [1, WIDE], "parameters": parameters}
    head = json.dumps({"id": str(number), "inputs": [tensor]}).encode()
    headers = [
        ("content-type", b"application/octet-stream"),
        ("inference-header-content-length", b"%d" % len(head)),
    ]
    return Send(head + bytes([number % 251]) * WIDE, b"%d" % number, headers)


def test_a_backlog_of_large_requests_is_held_within_the_queue_limits(job: Job) -> None:
    total, queue = 3_000, 32 * MIB
    job.send(photo(n) for n in range(total))
    gate = job.folder / "gate"
    gate.touch()
    worker = job.start(
        model__factory="tests.models:Wide",
        model__options={"gate": str(gate)},
        batch__max_batch_size=16,
        batch__max_batch_bytes=8 * MIB,
        batch__max_queue_size=100_000,
        batch__max_queue_bytes=queue,
        inference__execution_timeout_ms=300_000,
    )
    with Watch(worker) as watch:
        worker.await_metric("forebay_paused", 1)
        assert worker.metric("forebay_queue_bytes") < queue + 16 * MIB
        gate.unlink()
        outcomes = job.await_settled()

    check_once(outcomes, map(str, range(total)))
    for outcome in outcomes:
        number = int(outcome.key or b"")
        length = int(outcome.header("inference-header-content-length") or 0)
        assert int.from_bytes((outcome.value or b"")[length:], "little") == number % 251 * WIDE
    declared = queue + 2 * (8 * MIB)  # the queue, and the inputs of the batch that runs and of the next
    assert watch.highest < PARENT + declared, f"the parent has grown to {watch.highest / MIB:.0f} MiB"
