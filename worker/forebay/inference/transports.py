"""How the loop reaches a replica: a process of its own (the default), a thread, or inline in the loop.

Each carries the same messages and the same staging slots. No torch is imported here, except by `thread` and `inline`,
which run the model in this process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol

from forebay.inference.forkserver import SERVER, Forked, can_fork
from forebay.inference.messages import Run, Skip, Start, decode_to_replica, encode
from forebay.inference.processes import signals_held

if TYPE_CHECKING:
    from forebay.inference.stepping import Stepping

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

    def send(self, message: bytes) -> None:
        """Send a message; raises OSError where the replica is gone."""
        assert self._connection is not None
        self._connection.send_bytes(message)

    def receive(self) -> bytes | None:
        """Return a message if one is there; raises EOFError where the replica is gone."""
        assert self._connection is not None
        try:
            return self._connection.recv_bytes() if self._connection.poll() else None
        except (EOFError, OSError):
            self._hung_up = True
            raise

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
        self._was_killed = False
        self._forks = can_fork() and not spawned
        self._entered = False

    def launch(self) -> None:
        """Start the process."""
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
        self._connection = Connection(ours.detach())
        self._hung_up = self._was_killed = False

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
        self._connection = Connection(ours.detach())
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


class InlineTransport:
    """A replica in the loop's own thread: for tests and tiny models. While it computes, nothing is polled."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._answers: deque[bytes] = deque()
        self._runner: object = None
        self._stepping: Stepping | None = None
        self._has_answered = False

    def launch(self) -> None:
        """Do nothing: the model is loaded by the first message."""
        self._runner = self._stepping = None

    def send(self, message: bytes) -> None:
        """Run what the message asks for."""
        from forebay.inference.example import DeviceLost
        from forebay.inference.replica import begin_replica
        from forebay.inference.runner import Runner

        job = decode_to_replica(message)
        if isinstance(job, Start):
            answer, self._runner = begin_replica(job, self._memory)
            self._answers.append(encode(answer))
            if isinstance(self._runner, Runner) and self._runner.steps is not None:
                from forebay.inference.stepping import Stepping

                self._stepping = Stepping(
                    self._runner, self._runner.steps, lambda told: self._answers.append(encode(told))
                )
        elif self._stepping is not None and isinstance(job, Skip):
            self._stepping.skip(job)
        elif self._stepping is not None and isinstance(job, Run):
            self._stepping.take(job)
        elif isinstance(job, Run) and isinstance(self._runner, Runner):
            try:
                self._answers.append(encode(self._runner.run(job)))
            except DeviceLost as error:
                raise OSError(f"the device is lost: {error}") from error

    def receive(self) -> bytes | None:
        """Return the next answer; where rows run in steps and none waits, run one step for it."""
        if not self._answers and self._stepping is not None and self._stepping.is_busy and not self._has_answered:
            from forebay.inference.example import DeviceLost

            try:
                self._stepping.advance()
            except DeviceLost as error:
                raise OSError(f"the device is lost: {error}") from error
        self._has_answered = bool(self._answers)  # then the loop looks once more, for a rest that is not there
        return self._answers.popleft() if self._answers else None

    def descriptor(self) -> int | None:
        """Return None: answers are there at once."""
        return None

    def gone(self) -> str | None:
        """Return None: it lives as long as the loop."""
        return None

    def hang_up(self) -> None:
        """Forget the model."""
        if self._runner is not None:
            from forebay.inference.runner import Runner

            if isinstance(self._runner, Runner):
                self._runner.close()
        self._runner = self._stepping = None

    def kill(self) -> bool:
        """Say that it cannot be killed."""
        return False

    def stop(self) -> None:
        """Forget the model."""
        self.hang_up()
