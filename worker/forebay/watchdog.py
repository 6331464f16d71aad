"""A way out of calls that never return: leaving a group whose broker is silent has no time-out in the client.

Runs a thread of its own beside the block. It counts time in which this process ran: one that was frozen (a stopped
container, a suspended machine) has not been waiting, and gets its chance when it wakes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_STEPS = 10


@contextlib.contextmanager
def leave_within(seconds: float, code: int) -> Iterator[None]:
    """End the process with exit `code`, and a sentence, if the block is still running after `seconds`."""
    done = threading.Event()

    def watch() -> None:
        for _ in range(_STEPS):  # a freeze, however long, ends no more than the step in which it fell
            if done.wait(seconds / _STEPS):
                return
        os.write(2, f"forebay: a call to Kafka has not returned for {seconds:g} s, so this worker leaves\n".encode())
        os._exit(code)

    threading.Thread(target=watch, name="forebay-watchdog", daemon=True).start()
    try:
        yield
    finally:
        done.set()
