"""A replica in the loop's own thread. Imports torch once it is launched.

Its answers are there at once: sending a batch runs it, and looking for an answer runs one step where rows run in steps.
"""

from __future__ import annotations

import mmap
from collections import deque
from typing import TYPE_CHECKING

from forebay.inference.messages import Run, Skip, Start, decode_to_replica, encode

if TYPE_CHECKING:
    from forebay.inference.stepping import Stepping


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
