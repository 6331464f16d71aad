"""The fork server: processes that are forked, killed, lost with it, or never forked, as a pool of replicas sees it."""

from __future__ import annotations

import ctypes
import errno
import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from forebay.inference import forking, transports
from forebay.inference.assembly import build_pool
from forebay.inference.forkserver import SERVER, Forked, ForkServer, can_fork
from forebay.inference.pool import Pool
from forebay.inference.replicas import State
from forebay.inference.transports import ProcessTransport
from forebay.settings import Batch, Delivery, Inference, ModelSettings
from tests.kafka_probe import is_gone
from tests.models import Double

pytestmark = pytest.mark.skipif(not can_fork(), reason="there is no fork server on this system")


@pytest.fixture(scope="module", autouse=True)
def _kept() -> Iterator[None]:
    """Let the server outlive a test: importing torch is what it saves."""
    SERVER.enter()
    yield
    SERVER.leave()


@pytest.fixture
def pool() -> Iterator[Pool]:
    model = ModelSettings(name="double", factory="tests.models:Double")
    sections = (Inference(replicas=2, start_timeout_ms=60_000), Batch(max_batch_size=2), Delivery())
    pool = build_pool([model], sections, [Path.cwd()], count(1))
    collect(pool, lambda: pool.ready)
    yield pool
    pool.stop()


class Draws(Double):
    """Says which random numbers its process draws."""

    def load(self, device: torch.device) -> None:
        super().load(device)
        drawn = [torch.rand(1).item(), float(np.random.rand()), random.random()]
        (Path(os.environ["DRAWN"]) / str(os.getpid())).write_text(json.dumps(drawn))


class Clings(Double):
    """Does not want to die with its parent."""

    def load(self, device: torch.device) -> None:
        super().load(device)
        ctypes.CDLL(None).prctl(1, 0)


class Breeds(Double):
    """Has a child that holds all that it holds, as a data loader's worker does, and outlives it."""

    def load(self, device: torch.device) -> None:
        super().load(device)
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_the_end_of_a_replica_is_noticed_while_its_children_hold_its_socket(start_method: Any) -> None:
    model = ModelSettings(name="double", factory="tests.inference.test_forkserver:Breeds")
    pool = build_pool([model], (Inference(start_method=start_method), Batch(), Delivery()), [Path.cwd()], count(1))
    children: list[psutil.Process] = []
    try:
        collect(pool, lambda: pool.ready)
        process = process_of(pool)
        assert (process.ppid() == os.getpid()) is (start_method == "spawn")
        children = process.children()
        process.kill()
        collect(pool, lambda: pool.restarts == 1)
        assert [is_gone(child) for child in children] == [False]
        assert [why.split(", ")[-1] for why in lost(pool)] == ["it was ended by signal 9"]
    finally:
        for child in children:
            child.kill()
        pool.stop()


def test_no_two_replicas_draw_the_same_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAWN", str(tmp_path))
    monkeypatch.setattr(transports, "SERVER", ForkServer())  # it has the environment of this test
    model = ModelSettings(name="double", factory="tests.inference.test_forkserver:Draws")
    pool = build_pool([model], (Inference(replicas=2), Batch(), Delivery()), [Path.cwd()], count(1))
    try:
        collect(pool, lambda: pool.ready)
        one, other = (json.loads(path.read_text()) for path in tmp_path.iterdir())
        assert all(a != b for a, b in zip(one, other, strict=True))
    finally:
        pool.stop()


def test_a_replica_that_does_not_die_with_its_server_is_killed() -> None:
    model = ModelSettings(name="double", factory="tests.inference.test_forkserver:Clings")
    pool = build_pool([model], (Inference(), Batch(), Delivery()), [Path.cwd()], count(1))
    try:
        collect(pool, lambda: pool.ready)
        clinging, killed = process_of(pool), server(pool)
        clinging.suspend()  # as in a long forward: it does not notice
        killed.kill()
        killed.wait(60)
        assert not is_gone(clinging)
        assert next(iter(pool.of("double"))).transport.kill()
        assert is_gone(clinging)
    finally:
        pool.stop()


def test_where_descriptors_of_processes_are_forbidden_there_is_no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not can_fork()


def collect(pool: Pool, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not until():
        assert time.monotonic() < deadline
        pool.collect(time.monotonic(), wait=0.05)


def process_of(pool: Pool, index: int = 0) -> psutil.Process:
    transport = list(pool.of("double"))[index].transport
    assert isinstance(transport, ProcessTransport)
    assert transport.pid is not None
    return psutil.Process(transport.pid)


def server(pool: Pool) -> psutil.Process:
    return psutil.Process(process_of(pool).ppid())


def oom_score(process: psutil.Process) -> int:
    """Return how much sooner than by its memory the kernel ends a process when there is none left."""
    return int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())


def lost(pool: Pool) -> list[str]:
    return [str(notice.fields["why"]) for notice in pool.notices if notice.event == "replica_lost"]


def test_a_replica_that_was_killed_is_forked_anew_and_its_end_is_told(pool: Pool) -> None:
    first, other = process_of(pool), process_of(pool, 1)
    assert first.name() == "forebay-replica"
    assert server(pool).name() == "forebay-forks"
    assert first.ppid() == other.ppid() == server(pool).pid
    assert oom_score(first) == min(oom_score(server(pool)) + 500, 1000)
    assert oom_score(server(pool)) == oom_score(psutil.Process())
    first.kill()
    collect(pool, lambda: pool.restarts == 1 and pool.ready)
    assert [why.split(", ")[-1] for why in lost(pool)] == ["it was ended by signal 9"]
    assert is_gone(first)
    assert process_of(pool).pid != first.pid
    assert process_of(pool, 1).pid == other.pid
    assert process_of(pool).ppid() == other.ppid()


def test_without_a_free_file_descriptor_a_replica_is_down_until_there_are_some_again(pool: Pool) -> None:
    first, other = process_of(pool), process_of(pool, 1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, before[1]))
        os.kill(first.pid, signal.SIGKILL)
        collect(pool, lambda: pool.restarts == 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert [why.split(", ")[-1].split(";")[0] for why in lost(pool)] == [
        "it was ended by signal 9",
        *["it cannot be started: Too many open files"] * 2,
    ]
    collect(pool, lambda: pool.ready)
    assert process_of(pool, 1).pid == other.pid


def test_replicas_end_with_their_server_and_a_new_one_forks_the_next(pool: Pool) -> None:
    killed, first, other = server(pool), process_of(pool), process_of(pool, 1)
    killed.kill()
    collect(pool, lambda: pool.restarts == 2 and pool.ready)
    assert is_gone(first)
    assert is_gone(other)
    assert server(pool).pid != killed.pid
    assert [why.split(", ")[-1] for why in lost(pool)] == ["it was ended by signal 9"] * 2


def test_a_replica_of_a_server_that_is_stopped_can_be_killed_and_the_next_comes_of_another(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, first, other = server(pool), process_of(pool), process_of(pool, 1)
    stopped.suspend()
    first.kill()
    collect(pool, lambda: pool.restarts == 1)
    assert is_gone(first)
    waiting = next(iter(pool.of("double")))
    collect(pool, lambda: waiting.state is State.STARTING)
    with monkeypatch.context() as patched:
        patched.setattr(waiting, "late", lambda *_: "it did not start in time")
        collect(pool, lambda: pool.restarts == 2)
    collect(pool, lambda: pool.ready)
    assert process_of(pool).ppid() not in (stopped.pid, os.getpid())
    assert process_of(pool, 1).pid == other.pid  # it lives on with the one that is stopped
    stopped.resume()
    assert process_of(pool, 1).is_running()


def ignored(process: psutil.Process) -> int:
    """Return the signals that a process ignores, as bits."""
    [line] = [
        line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("SigIgn")
    ]
    return int(line.split()[1], 16)


def test_a_process_that_nobody_wants_any_more_is_not_forked_and_no_signal_disturbs_the_import() -> None:
    before = set(psutil.Process().children())
    own = ForkServer()
    own.enter()
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.memfd_create("nothing"), "wb") as memory:
        unwanted = own.fork("replica", (theirs.fileno(), memory.fileno()))
        [importing] = set(psutil.Process().children()) - before
        of_a_group = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        while not all(ignored(importing) & 1 << number - 1 for number in of_a_group):
            for number in of_a_group:
                importing.send_signal(number)
            time.sleep(0.01)
        for number in of_a_group:
            importing.send_signal(number)
        unwanted.kill()
        assert unwanted.wait(0) == -signal.SIGKILL
    assert not is_gone(importing)
    own.leave()
    assert is_gone(importing)


def test_a_loop_that_lets_go_of_a_process_has_it_killed_and_one_that_waits_is_told_its_exit_code() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.memfd_create("small"), "wb") as memory:
        memory.truncate(4096)
        forked = SERVER.fork("replica", (theirs.fileno(), memory.fileno()))
        while forked.pid is None:
            assert forked.poll() is None
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            forked.wait(0.01)
        process = psutil.Process(forked.pid)
        forked._status.close()
        assert process.wait(60) is None or is_gone(process)
        assert forked.poll() == -signal.SIGKILL
        another = SERVER.fork("replica", (theirs.fileno(), memory.fileno()))
        ours.close()
        assert another.wait(60) == 1  # it reads nothing where its first message should be


def test_a_process_that_cannot_be_forked_is_told_as_its_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refuse)
    control, asking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with control, theirs, subprocess.Popen(["sleep", "0"]) as nobody:
        forked = Forked(ours, nobody)
        socket.send_fds(asking, [b"replica"], [0, 1, theirs.fileno()])
        asking.close()
        theirs.close()
        forking.Server(control, {}).serve()
        assert forked.wait(0) == forking.EXIT_CANNOT_FORK
    assert "a process cannot be forked: " in capfd.readouterr().err
