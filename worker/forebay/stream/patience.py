"""Calls of the client that do not keep their time-out: made on a thread of their own, which is left behind in the end.

`send_offsets_to_transaction` is one: while the group's coordinator is away it does not return (librdkafka#5456, still
so in 2.16.0), and it seems not always after its connection was reset. Only the loop's thread waits here.
"""

from __future__ import annotations

import queue
import threading
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

    def call(self, call: Call, seconds: float) -> Any:
        """Return what `call` returns, or raise what it raises; TimeoutError where it does neither in time.

        Only time in which this process ran is counted: one that was frozen has not been waiting.
        """
        if self._calls is None:
            self._calls, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
            arguments = (self._calls, self._answers)
            threading.Thread(target=_serve, args=arguments, name="forebay-patience", daemon=True).start()
        self._calls.put(call)
        for _ in range(_STEPS):
            try:
                value, error = self._answers.get(timeout=seconds / _STEPS)
            except queue.Empty:
                continue
            if error is not None:
                raise error
            return value
        self._calls.put(None)
        self._calls = None
        raise TimeoutError(f"a call to Kafka has not returned for {seconds:g} s")


def _serve(calls: queue.SimpleQueue[Call | None], answers: queue.SimpleQueue[Answer]) -> None:
    while (call := calls.get()) is not None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))
        del call  # with it goes the client, if nobody else has it any more
