"""Calls of the client that take long or do not keep their time-out: on a thread of their own, left behind in the end.

`send_offsets_to_transaction` is one: while the group's coordinator is away it does not return (librdkafka#5456, still
so in 2.16.0), and it seems not always after its connection was reset. The loop's thread alone begins and ends them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

_STEPS = 10

Call = Callable[[], Any]
Answer = tuple[Any, BaseException | None]


class Patience:
    """Makes one call after the other; a thread whose call was given up ends by itself, should that ever return."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call | None] | None = None
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._seconds = self._left = self._looked_at = 0.0
        self.value: Any = None
        """What the last call has returned."""

    def begin(self, call: Call, seconds: float) -> None:
        """Begin a call; the one before it must have ended."""
        if self._calls is None:
            self._calls, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
            arguments = (self._calls, self._answers)
            threading.Thread(target=_serve, args=arguments, name="forebay-patience", daemon=True).start()
        self._seconds = self._left = seconds
        self._looked_at = time.monotonic()
        self._calls.put(call)

    def ended(self, wait: float = 0.0) -> bool:
        """Whether the call has returned; waits up to `wait` seconds for it.

        Raises what it raised, and TimeoutError where it did neither in time: then it is given up. Only time in which
        this process ran is counted: one that was frozen has not been waiting.
        """
        try:
            self.value, error = self._answers.get(block=wait > 0, timeout=wait or None)
        except queue.Empty:
            now = time.monotonic()
            self._left -= min(now - self._looked_at, self._seconds / _STEPS)
            self._looked_at = now
            if self._left > 0:
                return False
            if self._calls is not None:
                self._calls.put(None)
            self._calls = None
            raise TimeoutError(f"a call to Kafka has not returned for {self._seconds:g} s") from None
        if error is not None:
            raise error
        return True

    def call(self, call: Call, seconds: float) -> Any:
        """Return what `call` returns, or raise what `ended` raises."""
        self.begin(call, seconds)
        while not self.ended(seconds / _STEPS):
            pass
        return self.value


def _serve(calls: queue.SimpleQueue[Call | None], answers: queue.SimpleQueue[Answer]) -> None:
    while (call := calls.get()) is not None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))
        del call  # with it goes the client, if nobody else has it any more
