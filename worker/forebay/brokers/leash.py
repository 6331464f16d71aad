"""The process between Forebay and a JVM: it kills the JVM when Forebay dies, however Forebay dies.

Run as a script in an interpreter of its own (`python -I -S leash.py`), so it imports the standard library alone and
never forebay. Linux's parent-death signal is not enough by itself: it fires when the *thread* that forked ends, so
the leash, which has one thread, sets it on the JVM, and watches its own parent through a pipe and its parent's id.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

SIGNALS = {
    b"T": signal.SIGTERM,
    b"K": signal.SIGKILL,
    b"S": signal.SIGSTOP,
    b"C": signal.SIGCONT,
}
"""The commands that the parent writes, one byte each; every one is answered with ACKNOWLEDGED once it is done."""

ACKNOWLEDGED = b"+"
THEN = "--then--"
PARENT_CHECK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def die_with_the_leash() -> None:
    """Ask Linux to kill this process when the leash dies; runs in the child, between fork and exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run the commands one after the other and hold each: `PARENT_PID LOG FOLDER COMMAND… THEN COMMAND…`.

    Ends with the exit status of the first command that fails, or of the last. Removes FOLDER if the parent dies first.
    """
    parent, log, folder, *words = arguments
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    status = 0
    while words and status == 0:
        end = words.index(THEN) if THEN in words else len(words)
        command, words = words[:end], words[end + 1 :]
        with open(log, "ab") as output:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=die_with_the_leash
            )
        status = hold(child, wake_read, int(parent), folder)
    return status


def hold(child: subprocess.Popen[bytes], wake: int, parent: int, folder: str) -> int:
    """Pass the parent's orders on until the child ends; returns its status as a shell would."""
    while child.poll() is None:
        ready, _, _ = select.select([0, wake], [], [], PARENT_CHECK_SECONDS)
        if wake in ready:
            os.read(wake, 512)
        # A fork of the parent may hold the pipe open after the parent is gone: its id says so all the same.
        order = os.read(0, 1) if 0 in ready else None
        if order == b"" or os.getppid() != parent:
            abandon(child, folder)
        elif order is not None:
            child.send_signal(SIGNALS[order])
            os.write(1, ACKNOWLEDGED)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def abandon(child: subprocess.Popen[bytes], folder: str) -> None:
    """Kill the child, paused or not, and remove its data if nobody is left to do it."""
    child.kill()
    child.wait()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the cluster's folder, once its last node is gone
            Path(folder).parent.rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
