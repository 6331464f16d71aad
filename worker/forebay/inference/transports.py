"""How the loop reaches a replica: a process of its own (the default), or a thread; for `inline` see there.

Each carries the same messages and the same staging slots. No torch is imported here, except by `thread`, which runs the
model in this process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Protocol

from forebay.inference.forkserver import SERVER, Forked, can_fork
from forebay.inference.processes import signals_held

_EXIT_GRACE_SECONDS = 2.0
_HUNG_UP_SECONDS = 1.0
"""For a process that has closed its socket to have ended: giving its memory back takes a busy machine a while."""


class Transport(Protocol):
    """The loop's end of a replica."""

    def launch(self) -> None: ...
    def send(self, message: bytes) -> None: ...
    def receive(self) -> bytes | None: ...
    def descriptor(self) -> int | None: ...
    def gone(self) -> str | None: ...
    def hang_up(self) -> None: ...
    def kill(self) -> bool: ...
    def stop(self) -> None: ...


class _Connected:
    """The loop's end of a socket pair to a replica."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._hung_up = False
        self._news = select.poll()

    def _connect(self, ours: socket.socket, ending: int | None = None) -> None:
        """Begin to listen; `ending` becomes readable when the replica has ended: its children may hold its socket."""
        self._connection = Connection(ours.detach())
        self._hung_up = False
        self._news = select.poll()
        for descriptor in (self._connection.fileno(), ending):
            if descriptor is not None:
                self._news.register(descriptor, select.POLLIN)

    def send(self, message: bytes) -> None:
        """Send a message; raises OSError where the replica is gone."""
        assert self._connection is not None
        self._connection.send_bytes(message)

    def receive(self) -> bytes | None:
        """Return a message if one is there; raises EOFError where the replica is gone."""
        assert self._connection is not None
        ready = self._news.poll(0)
        if not ready and not self._has_ended:
            return None
        try:
            if any(descriptor == self._connection.fileno() for descriptor, _ in ready):
                return self._connection.recv_bytes()
            if (how := self.gone()) is not None:
                raise EOFError(how)
        except (EOFError, OSError):
            self._hung_up = True
            raise
        return None

    @property
    def _has_ended(self) -> bool:
        """Whether it is known by now that the replica has ended; asks nobody."""
        return False

    def gone(self) -> str | None:
        """Say how the replica ended; None while it lives."""
        raise NotImplementedError

    def descriptor(self) -> int | None:
        """Return what becomes readable with the next message."""
        return self._connection.fileno() if self._connection is not None else None

    def hang_up(self) -> None:
        """Let the replica end by itself once it has nothing to do; waits for nothing."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class ProcessTransport(_Connected):
    """A replica in a process of its own, forked of a process that computes nothing, or spawned: it can be killed.

    `kind` is `replica` or `preparer`, which talks alike. A spawned one imports torch by itself; where there is no fork
    server, all do.
    """

    def __init__(self, memory_descriptor: int, kind: str = "replica", *, spawned: bool = False) -> None:
        super().__init__()
        self._memory_descriptor = memory_descriptor
        self._kind = kind
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._pidfd: int | None = None
        self._was_killed = False
        self._forks = can_fork() and not spawned
        self._entered = False

    def launch(self) -> None:
        """Start the process. Raises OSError where no process or descriptor is to be had."""
        self._process = None
        ours, theirs = socket.socketpair()
        if self._forks and not self._entered:
            SERVER.enter()
            self._entered = True
        with theirs:
            try:
                self._process = self._start(theirs.fileno())
            except OSError:
                ours.close()
                raise
        self._was_killed = False
        self._connect(ours, self._ending(self._process))

    def _ending(self, process: subprocess.Popen[bytes] | Forked) -> int | None:
        if isinstance(process, Forked):
            return process.fileno()
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # then only the socket tells
                self._pidfd = os.pidfd_open(process.pid)
        return self._pidfd

    def _start(self, child: int) -> subprocess.Popen[bytes] | Forked:
        if self._forks:
            return SERVER.fork(self._kind, (child, self._memory_descriptor))
        command = [sys.executable, "-m", "forebay.inference.processes", self._kind]
        command += [str(child), str(self._memory_descriptor), str(os.getpid())]
        with signals_held():
            return subprocess.Popen(command, pass_fds=(child, self._memory_descriptor), stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int | None:
        """The process id."""
        if isinstance(self._process, Forked):
            self._process.poll()
        return self._process.pid if self._process else None

    @property
    def _has_ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    def hang_up(self) -> None:
        """Let the process end by itself once it has nothing to do; waits for nothing."""
        super().hang_up()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def gone(self) -> str | None:
        """Say how the process ended; None while it lives, and where it was ended from here."""
        code = self._process.poll() if self._process is not None else None
        if code is None or self._was_killed:
            return None
        return f"it was ended by signal {-code}" if code < 0 else f"it exited with code {code}"

    def kill(self) -> bool:
        """End the process at once; a stopped one, too. One that hung up may say by itself how it ended."""
        if self._process is not None:
            if self._hung_up:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_HUNG_UP_SECONDS)
            self._was_killed = self._process.poll() is None
            self._process.kill()
            self._process.wait()
        self.hang_up()
        return True

    def stop(self) -> None:
        """Let the process end by itself, for a moment, then end it."""
        self.hang_up()
        if self._process is not None:
            try:
                self._process.wait(_EXIT_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._entered:
            SERVER.leave()
            self._entered = False


class ThreadTransport(_Connected):
    """A replica in a thread of this process. It cannot be killed: a hang ends the worker."""

    def __init__(self, memory: mmap.mmap) -> None:
        super().__init__()
        self._memory = memory
        self._thread: threading.Thread | None = None

    def launch(self) -> None:
        """Start the thread."""
        from forebay.inference.replica import serve

        ours, theirs = socket.socketpair()
        self._connect(ours)
        far_end = Connection(theirs.detach())

        def run() -> None:
            try:
                serve(far_end, self._memory)
            finally:
                far_end.close()

        self._thread = threading.Thread(target=run, name="forebay-replica", daemon=True)
        self._thread.start()

    def gone(self) -> str | None:
        """Say how the thread ended; None while it lives."""
        return None if self._thread is None or self._thread.is_alive() else "its thread ended"

    def kill(self) -> bool:
        """Say that a thread cannot be killed, unless it has ended already."""
        ended = self.gone() is not None
        self.hang_up()
        return ended

    def stop(self) -> None:
        """Let the thread end when its batch is finished."""
        self.hang_up()
        if self._thread is not None:
            self._thread.join(_EXIT_GRACE_SECONDS)
