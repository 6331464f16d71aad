"""The loop's side of the fork server: the process that has torch imported, of which replicas and preparers are forked.

Importing torch costs seconds of CPU, and a replica that takes the place of a dead one would pay them again. The server
pays them once; it computes nothing, so it is always fit to be forked. The loop's thread asks; nothing here waits for an
import. Linux alone: elsewhere processes are spawned. No torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time

from forebay.inference.processes import signals_held

FORKED, EXITED = b"F", b"X"
STATUS = struct.Struct("!ci")
"""What the server says of a child: FORKED with its process id and its pidfd beside it, EXITED with its exit code."""

_TOLD_SECONDS = 1.0
_END_SECONDS = 0.2


def can_fork() -> bool:
    """Whether this system has what the server needs; a container may forbid it."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class Forked:
    """A process that the server forks, or is going to: as much of subprocess.Popen as a transport uses."""

    def __init__(self, status: socket.socket, server: subprocess.Popen[bytes]) -> None:
        self._status = status
        self._server = server
        self._pidfd: int | None = None
        self.pid: int | None = None
        self.returncode: int | None = None
        self.was_refused = False
        status.setblocking(False)

    def fileno(self) -> int:
        """Return what becomes readable when there is news of it: it was forked, or has ended."""
        return self._status.fileno()

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal's number; None while it lives or is not forked yet."""
        while self.returncode is None:
            try:
                told, descriptors, _, _ = socket.recv_fds(self._status, STATUS.size, 1)
            except BlockingIOError:
                break
            except OSError:
                told, descriptors = b"", []
            self._hear(told, descriptors)
        return self.returncode

    def kill(self) -> None:
        """End it at once; one that is not forked yet will not be."""
        if self.poll() is not None:
            return
        if self._pidfd is None:
            self.was_refused = True
            self._end(-signal.SIGKILL)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code once it has ended. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        ended = False
        while (code := self.poll()) is None:
            if ended:  # it is gone, and a server that does not say how is stopped or dying
                self._end(-signal.SIGKILL)
                continue
            left = None if until is None else max(until - time.monotonic(), 0.0)
            if left == 0.0:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            ended = self._await(left)
        return code

    def _await(self, seconds: float | None) -> bool:
        """Wait until the server says something or the process has ended; say whether it has and nobody tells how."""
        poller = select.poll()
        poller.register(self._status, select.POLLIN)
        if self._pidfd is not None:
            poller.register(self._pidfd, select.POLLIN)
        ready = [descriptor for descriptor, _ in poller.poll(None if seconds is None else seconds * 1000)]
        if self._pidfd not in ready or self._status.fileno() in ready:
            return False
        return not _becomes_readable(self._status.fileno(), _TOLD_SECONDS)

    def _hear(self, told: bytes, descriptors: list[int]) -> None:
        if len(told) < STATUS.size:  # the server is gone
            code = self._server.poll()
            self._see_to_its_end()
            self._end(-signal.SIGKILL if self.pid is not None or not code else code)
            return
        kind, number = STATUS.unpack(told)
        if kind == EXITED:
            self._end(number)
            return
        self.pid = number
        if not descriptors:  # this process has none to spare: what it cannot kill it lets go, and the server kills it
            self._end(-signal.SIGKILL)
            return
        self._pidfd = descriptors[0]
        os.set_inheritable(self._pidfd, False)

    def _see_to_its_end(self) -> None:
        """Kill what a server has left: the kernel does not where the model has put that off."""
        if self._pidfd is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        _becomes_readable(self._pidfd, _TOLD_SECONDS)
        with contextlib.suppress(ChildProcessError):  # where this is the first process of a container it is its child
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)

    def _end(self, code: int) -> None:
        self.returncode = code
        self._status.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _becomes_readable(descriptor: int, seconds: float) -> bool:
    poller = select.poll()  # select() itself knows only the first thousand descriptors
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


class ForkServer:
    """A fork server, started by the first that asks and ended with the last that leaves; `module` is what it runs."""

    def __init__(self, module: str = "forebay.inference.forking") -> None:
        self._module = module
        self._users = 0
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._children: list[Forked] = []

    def enter(self) -> None:
        """Take part in it."""
        self._users += 1

    def leave(self) -> None:
        """Take no part any more; after the last one the server ends."""
        self._users -= 1
        if not self._users:
            self._close()

    def fork(self, kind: str, descriptors: tuple[int, int]) -> Forked:
        """Ask for a replica or a preparer with the descriptors of its connection and of its staging memory."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        elif any(child.was_refused for child in self._children):  # it is stuck, perhaps
            self._leave_behind()
            self._start()
        try:
            child = self._ask(kind, descriptors)
        except ConnectionError:  # it ended a moment ago
            self._start()
            child = self._ask(kind, descriptors)
        self._children = [*(one for one in self._children if one.poll() is None), child]
        return child

    def _start(self) -> None:
        self._close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", self._module, str(theirs.fileno()), str(os.getpid())]
            try:
                with signals_held():
                    self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            except OSError:
                ours.close()
                raise
        self._control = ours

    def _ask(self, kind: str, descriptors: tuple[int, int]) -> Forked:
        assert self._control is not None
        assert self._process is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._control, [kind.encode()], [*descriptors, theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return Forked(ours, self._process)

    def _close(self) -> None:
        """End it; nobody has a child of it any more."""
        process = self._let_go()
        if process is not None:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _leave_behind(self) -> None:
        """Let it be while it has children, and end with the last."""
        is_needed = any(child.poll() is None for child in self._children)
        process = self._let_go()
        if process is not None and not is_needed:
            process.kill()
            process.wait()

    def _let_go(self) -> subprocess.Popen[bytes] | None:
        process = self._process
        if self._control is not None:
            self._control.close()
        self._control = self._process = None
        self._children = []
        return process


SERVER = ForkServer()
"""The one of this process."""
