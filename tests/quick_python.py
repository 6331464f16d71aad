"""Workers that start quickly: `forebay run` forked of a process that has imported all it needs, with torch.

A worker and its replica take 5 s of a core to start, nearly all of it for imports: dear for one that lives for a few
seconds. Here one process per session of tests imports them, as the worker's own fork server does for its replicas, and
each worker is forked of it: with the command line, the environment, the folder, the signals and the exit code of a
process of its own, and with its fork server beside it. QUICK_PYTHON=0 lets every test start the command itself; tests
marked `long`, and those that use the fixture `plain_python`, always do.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

from forebay.inference.forkserver import SERVER, Forked, ForkServer, can_fork

VARIABLE = "QUICK_PYTHON"
ROOT = Path(__file__).resolve().parents[1]
FORKED_SECONDS = 120.0

_forks: ForkServer | None = None
_is_plain = False


@contextlib.contextmanager
def quick_python() -> Iterator[None]:
    """Let workers start quickly meanwhile."""
    global _forks
    if not can_fork() or os.environ.get(VARIABLE) == "0":
        yield
        return
    forks = _forks = ForkServer(__name__)
    forks.enter()
    try:
        yield
    finally:
        forks.leave()
        _forks = None


@contextlib.contextmanager
def plain_python() -> Iterator[None]:
    """Let workers start as their users start them meanwhile."""
    global _is_plain
    before, _is_plain = _is_plain, True
    try:
        yield
    finally:
        _is_plain = before


def is_quick() -> bool:
    """Whether workers start quickly now."""
    return _forks is not None and not _is_plain


class QuickProcess:
    """A command that is forked: as much of subprocess.Popen as the tests use."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str], output: IO[bytes]) -> None:
        assert _forks is not None
        order = {"words": list(words), "folder": str(folder), "environment": dict(environment)}
        with os.fdopen(os.memfd_create("order"), "w+") as file:
            json.dump(order, file)
            file.flush()
            with contextlib.chdir(ROOT), mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # for the server's own start
                self._forked: Forked = _forks.fork("command", (file.fileno(), output.fileno()))
        deadline = time.monotonic() + FORKED_SECONDS
        while self._forked.pid is None and self._forked.poll() is None:
            assert time.monotonic() < deadline, f"{words} was not forked within {FORKED_SECONDS} s"
            time.sleep(0.01)
        assert self._forked.pid is not None, f"{words} was not forked"
        self.pid: int = self._forked.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, where it is known that it has ended."""
        return self._forked.returncode

    def poll(self) -> int | None:
        """Return the exit code; None while it lives."""
        return self._forked.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended. Raises subprocess.TimeoutExpired."""
        return self._forked.wait(timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self._forked.kill()


def _be_a_command(order: int, output: int) -> NoReturn:
    """Become a process that runs a command of forebay's, as if it had been started by itself."""
    from forebay.inference.processes import name_process

    with os.fdopen(order, "r") as file:
        file.seek(0)
        wanted: dict[str, Any] = json.load(file)
    os.setsid()
    name_process("python")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    sys.path[0] = wanted["folder"]
    sys.argv = ["forebay", *wanted["words"]]
    _fork_the_fork_server()
    _end_with(_run())


def _fork_the_fork_server() -> None:
    """Give this worker the fork server that it would start: a child, while nothing but imports has happened."""
    from forebay.inference import forking
    from forebay.inference.processes import begin

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        begin(parent)
        forking.serve(theirs.detach(), forking.processes_of_a_worker())
    theirs.close()
    SERVER._control, SERVER._process = ours, _Child(pid)  # type: ignore[assignment]


class _Child:
    """A process that this one has forked: as much of subprocess.Popen as a ForkServer uses of its own."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the fork server", timeout or 0.0)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


def _run() -> int:
    from forebay.cli import main

    try:
        main()
    except SystemExit as wish:
        return wish.code if isinstance(wish.code, int) else int(wish.code is not None)
    return 0


def _end_with(code: int) -> NoReturn:
    """End as an interpreter does, but for what it would unload."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _main() -> NoReturn:
    """Be the process that workers are forked of."""
    from importlib import import_module

    from forebay.inference import forking
    from forebay.inference.processes import begin

    begin(int(sys.argv[2]))
    forking.processes_of_a_worker()
    for module in PRELOADED:
        import_module(module)
    forking.serve(int(sys.argv[1]), {"command": _be_a_command})


PRELOADED = (
    "confluent_kafka.admin",
    "forebay.assembly",
    "forebay.cli.run",
    "forebay.stream.admin",
    "forebay.stream.mock",
    "forebay.supervision.devices",
    "forebay.tracing",
    "forebay.worker",
)
"""What a worker imports while it runs, beside what all of it does."""

if __name__ == "__main__":
    _main()
