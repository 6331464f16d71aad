"""The fork server itself: imports torch once, then forks a process for each that is asked for, and tells how it ended.

Started as `python -m forebay.inference.forking FD PARENT`. It has one thread of its own and never computes, so that a
fork of it is as good as a new interpreter. A child dies with it, and it dies with the loop; a child whose loop has let
go of its status is killed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from forebay.inference.forkserver import EXITED, FORKED, STATUS
from forebay.inference.processes import begin, die_with_parent, name_process

EXIT_CANNOT_FORK = 71

Run = Callable[[int, int], NoReturn]
"""What the loop asks for becomes; it is given the two descriptors that came with the demand."""


@dataclass(frozen=True, slots=True)
class _Child:
    pid: int
    pidfd: int
    status: socket.socket


class Server:
    """Serves one loop until that hangs up and the last child has ended."""

    def __init__(self, control: socket.socket, runs: Mapping[str, Run]) -> None:
        self._control = control
        self._runs = runs
        self._children: dict[int, _Child] = {}
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)

    def serve(self) -> None:
        """Fork on demand."""
        listens = True
        while listens or self._children:
            for descriptor, _ in self._poller.poll():
                if descriptor == self._control.fileno():
                    listens = self._take()
                    if not listens:
                        self._poller.unregister(self._control)
                elif (child := self._children.get(descriptor)) is not None:
                    self._look_after(child, descriptor)

    def _take(self) -> bool:
        """Do what the loop asks; False where it has hung up."""
        asked, descriptors, _, _ = socket.recv_fds(self._control, 256, 3)
        if not asked:
            return False
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if len(descriptors) < 3:  # none is to be had any more; the loop is told by the status that is closed
            for descriptor in descriptors:
                os.close(descriptor)
            return True
        first, second, status = descriptors
        self._fork(asked.decode(), (first, second), socket.socket(fileno=status))
        os.close(first)
        os.close(second)
        return True

    def _fork(self, kind: str, given: tuple[int, int], status: socket.socket) -> None:
        parent = os.getpid()
        pid = -1
        try:
            pid = os.fork()
            if pid == 0:
                self._become(kind, given, status, parent)
            child = _Child(pid, os.pidfd_open(pid), status)
        except OSError as error:
            print(f"forebay: a process cannot be forked: {error}", file=sys.stderr, flush=True)
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            with contextlib.suppress(OSError):
                status.send(STATUS.pack(EXITED, EXIT_CANNOT_FORK))
            status.close()
            return
        self._children |= {status.fileno(): child, child.pidfd: child}
        self._poller.register(status, 0)  # says only that the loop has let go of it
        self._poller.register(child.pidfd, select.POLLIN)
        with contextlib.suppress(OSError):
            socket.send_fds(status, [STATUS.pack(FORKED, pid)], [child.pidfd])

    def _look_after(self, child: _Child, descriptor: int) -> None:
        if descriptor != child.pidfd:
            self._poller.unregister(child.status)
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        del self._children[child.status.fileno()], self._children[child.pidfd]
        self._poller.unregister(child.pidfd)
        with contextlib.suppress(KeyError):
            self._poller.unregister(child.status)
        with contextlib.suppress(OSError):
            child.status.send(STATUS.pack(EXITED, code))
        child.status.close()
        os.close(child.pidfd)

    def _become(self, kind: str, given: tuple[int, int], status: socket.socket, parent: int) -> NoReturn:
        """Be the child: keep nothing of the server's but what it has imported."""
        try:
            die_with_parent(parent)
            self._control.close()
            status.close()
            for child in set(self._children.values()):
                child.status.close()
                os.close(child.pidfd)
            np.random.seed()  # a model may use it, and all children would draw the same
            self._runs[kind](*given)
        except SystemExit as wish:  # the model's
            sys.stdout.flush()
            os._exit(wish.code if isinstance(wish.code, int) else 1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def serve(control: int, runs: Mapping[str, Run]) -> NoReturn:
    """Be a fork server, with the descriptor of the loop's demands; all that is to be shared is imported."""
    name_process("forebay-forks")
    os.set_inheritable(control, False)
    gc.collect()
    gc.freeze()
    Server(socket.socket(fileno=control), runs).serve()
    os._exit(0)  # it has nothing to tidy up, and torch takes its time over it


def processes_of_a_worker() -> Mapping[str, Run]:
    """Import torch and all that a worker's processes need; return what the loop may ask for."""
    from forebay.inference import preparer, replica

    return {"replica": replica.run, "preparer": preparer.run}


if __name__ == "__main__":
    begin(int(sys.argv[2]))
    serve(int(sys.argv[1]), processes_of_a_worker())
