"""What every process of the loop's does first, however it was started: outlive signals, but not the loop.

A process that is spawned runs this module, `python -m forebay.inference.processes KIND FD MEMORY_FD PARENT`, which
imports the one of its kind. No torch before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

_OF_A_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

_EXPENDABLE = 500
"""As if a process had half of the memory more than it has, out of a thousand: the machine's, or the container's."""

Serve = Callable[[Connection, mmap.mmap], int]


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold them back: a process that is started meanwhile has none before it ignores them, this one has them behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_A_GROUP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignore what a terminal or an orchestrator sends to the whole group: the loop decides when this ends."""
    for number in _OF_A_GROUP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_A_GROUP)


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, however that dies; a forward may last for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def name_process(name: str) -> None:
    """Say what this is, in at most 15 bytes, to ps -o comm, top and pstree."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def be_expendable() -> None:
    """Let the kernel end this process before the loop and the fork server where memory runs out: it is replaced."""
    with contextlib.suppress(OSError):  # not Linux, or forbidden
        path = Path("/proc/self/oom_score_adj")
        path.write_text(str(min(int(path.read_text()) + _EXPENDABLE, 1000)))  # more needs no right, less does


def be_a_process(serve: Serve, connection: int, memory: int) -> NoReturn:
    """Serve the loop with the descriptors of a connection and of the staging memory, until it hangs up; then exit."""
    be_expendable()
    mapped = mmap.mmap(memory, os.fstat(memory).st_size)
    code = serve(Connection(connection), mapped)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # not a normal exit: a broken device may hang in its destructors


def begin(parent: int) -> None:
    """Do what comes before the import of torch, which takes long enough to meet a signal."""
    ignore_signals()
    die_with_parent(parent)


if __name__ == "__main__":  # a process that is spawned: KIND FD MEMORY_FD PARENT
    begin(int(sys.argv[4]))
    importlib.import_module(f"forebay.inference.{sys.argv[1]}").run(int(sys.argv[2]), int(sys.argv[3]))
