"""A replica without a process: the test is its far end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from forebay.inference.matching import Finished
from forebay.inference.messages import Done, Mistake, Ready, Run, Skip, Spec, Start, decode_to_replica, encode
from forebay.inference.pool import Pool
from forebay.inference.staging import SlotSize
from forebay.records import Batch, Reason
from tests.unit.builders import request

SIZE = SlotSize(4_096, 4_096)
INPUT = Spec("x", "FP32", [-1, 1])


class FakeReplica:
    """A transport that keeps what was sent, and answers when it is told to.

    `answers_after` makes it answer by itself, after that many looks for an answer.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.alive = False
        self.can_be_killed = True
        self.hears = True
        self.cannot_start: OSError | None = None
        self.started: Start
        self.jobs: deque[Run] = deque()
        self.skips: list[tuple[int, list[int]]] = []
        self.answers: deque[bytes] = deque()
        self.stopped = False
        self.answers_after: int | None = None
        self._silent = 0

    def launch(self) -> None:
        self.launches += 1
        if self.cannot_start is not None:
            raise self.cannot_start
        self.alive = self.hears = True
        self.jobs.clear()
        self.answers.clear()

    def send(self, message: bytes) -> None:
        if not self.hears:
            raise BrokenPipeError("broken pipe")
        found = decode_to_replica(message)
        if isinstance(found, Start):
            self.started = found
        elif isinstance(found, Run):
            self.jobs.append(found)
            self._silent = 0
        elif isinstance(found, Skip):
            self.skips.append((found.number, found.requests))

    def receive(self) -> bytes | None:
        self._silent += 1
        if self.answers_after is not None and self.jobs and self._silent > self.answers_after:
            self.finish()
        if self.answers:
            return self.answers.popleft()
        if not self.alive:
            raise EOFError
        return None

    def descriptor(self) -> int | None:
        return None

    def gone(self) -> str | None:
        return None if self.alive else "it was ended by signal 9"

    def hang_up(self) -> None:
        self.stopped = True

    def kill(self) -> bool:
        self.alive = False
        return self.can_be_killed

    def stop(self) -> None:
        self.stopped = True

    # what the test does

    def say(self, message: Any) -> None:
        self.answers.append(encode(message))

    def get_ready(self, taken: Spec = INPUT, device: str = "cpu", answer: Sequence[bytes] = ()) -> None:
        outputs = [Spec("y", "FP32", [-1])]
        self.say(Ready([taken], outputs, False, device, 0.1, 0.1, [], [], answer=list(answer)))

    def die(self) -> None:
        self.alive = self.hears = False

    def finish(self, **changes: Any) -> None:
        """Answer the oldest job: no outputs for anybody unless `parts` says so, and an error for everybody else."""
        job = self.jobs.popleft()
        left = set(changes.get("left", ()))
        mistakes = [Mistake(index, "model_error", "done") for index in range(job.requests) if index not in left]
        told: dict[str, Any] = {"parts": [], "mistakes": mistakes, **changes}
        self.say(
            Done(
                job.number,
                told["parts"],
                told["mistakes"],
                0.0,
                0.0,
                told.get("took", 0.001),
                1,
                {},
                told.get("left", []),
                unsound=told.get("unsound", ""),
            )
        )


class PoolScene:
    """A pool of fake replicas, with the clock and the batches' numbers in the test's hand."""

    pool: Pool
    numbers: Iterator[int]
    now = 0.0

    def collect(self, seconds: float = 0.0) -> list[Finished]:
        self.now += seconds
        return self.pool.collect(self.now)

    def submit(self, *names: str) -> Batch:
        requests = [request(name) for name in names]
        batch = Batch(next(self.numbers), "model", requests, len(requests), Reason.IDLE, self.now)
        self.pool.submit(batch, self.now)
        return batch
