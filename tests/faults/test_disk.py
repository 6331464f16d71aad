"""Disks that are full: the broker's, and the one that takes the worker's log."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from forebay.broker import EmbeddedKafka
from tests.conftest import EmbeddedKafkas
from tests.faults.alone import run, runs_alone
from tests.faults.dumps import Watch
from tests.faults.history import Promise
from tests.integration.job import Job, MakeJob, ask, ask_binary, check_once, magic
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import KafkaProbe, eventually


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_log_that_nobody_takes_ends_no_worker(job: Job) -> None:
    """A full disk under the log, or a reader that is gone, used to end it with 1 at the next line."""
    job.send([*(ask(n) for n in range(100)), magic("bad", 3)])
    worker = WorkerProcess(job.settings(), Path("/dev/full"), ["--until-end"])
    job.workers.append(worker)
    assert worker.process.wait(120) == 0
    check_once(job.outcomes(), [*map(str, range(100)), "bad"])


def fill(folder: Path) -> Path:
    """Fill the disk under a folder; return the file that does it."""
    state, fat = os.statvfs(folder), folder / "fat"
    with fat.open("wb") as file, contextlib.suppress(OSError):
        file.write(bytes(state.f_bavail * state.f_frsize))
    return fat


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_a_broker_whose_disk_is_full_loses_nothing_once_it_has_room_again(
    request: pytest.FixtureRequest, tmp_path: Path, guarantee: Any
) -> None:
    """The broker ends, as Kafka does without a log folder; it is started again when the disk has room."""
    mount = "mount -t tmpfs -o size=80m none"
    if not runs_alone(request, "mount", f"d=$(mktemp -d) && {mount} $d && umount $d && rmdir $d"):
        return
    disk = tmp_path / "disk"
    disk.mkdir()
    run(f"{mount} {disk}")
    start: EmbeddedKafkas = request.getfixturevalue("embedded_kafka")
    kafka: EmbeddedKafka = start(data_dir=disk / "kafka")
    make_job: MakeJob = request.getfixturevalue("make_job")
    job = make_job(KafkaProbe(kafka.bootstrap_servers))
    with Watch(job, Promise(guarantee)) as watch:
        worker = job.start(delivery__guarantee=guarantee, batch__max_batch_size=16)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(1_000))
        job.await_answered(200)
        fat = fill(disk)
        more = threading.Thread(target=send_what_is_taken, args=(job, 1_000, 3_000), daemon=True)
        more.start()
        eventually(lambda: not kafka.java_pids(), "the broker has ended", 120)
        worker.await_not_ready()
        fat.unlink()
        kafka.restart()
        more.join(120)
        watch.fault("a full disk", since_start=True)
        job.await_settled(300)
        worker.await_ready()
    watch.verify()
    assert worker.stop() == 0
    assert "Traceback" not in worker.text()


def send_what_is_taken(job: Job, first: int, end: int) -> None:
    """Send requests to a broker that may refuse some."""
    with contextlib.suppress(AssertionError):
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(first, end))
