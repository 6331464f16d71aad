"""The order of batches in a replica: on an accelerator the next one is launched while the one before it computes.

Runs on the replica's one thread. It looks for a batch that waits and for one that has landed by turns, and never waits
for the device as long as either could come first.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

from forebay import failpoints
from forebay.inference.flights import Flight
from forebay.inference.messages import (
    Checked,
    Done,
    Measure,
    Measured,
    Run,
    Skip,
    Stepped,
    decode_to_replica,
    encode,
)
from forebay.inference.runner import Runner

_LOOK_SECONDS = 0.0001


class HungUpError(Exception):
    """The loop hung up, or asked the replica to stop."""


class Inbox:
    """What the loop sent and was not begun, and the way back. Every call raises HungUpError where the loop is gone."""

    def __init__(self, connection: Connection, measure: Callable[[Measure], Measured] | None = None) -> None:
        self._connection = connection
        self._measure = measure
        self._jobs: deque[Run] = deque()
        self.skip: Callable[[Skip], None] | None = None  # asked, too, where batches are begun before their turn

    def rest(self) -> list[Run]:
        """Return every batch that has come, without waiting."""
        while self.has_message():
            self._read()
        found = list(self._jobs)
        self._jobs.clear()
        return found

    def next(self) -> Run:
        """Wait for the next batch; what the loop said of it meanwhile is in it."""
        while not self._jobs or self.has_message():
            self._read()
        return self._jobs.popleft()

    def has_message(self, wait: float = 0.0) -> bool:
        """Whether something can be read, now or within `wait` seconds."""
        try:
            if wait:
                select.select([self._connection], [], [], wait)
            return self._connection.poll(0)
        except (EOFError, OSError) as error:
            raise HungUpError from error

    def has_batch(self, wait: float) -> bool:
        """Whether a batch waits, or comes within `wait` seconds."""
        if not self._jobs and self.has_message(wait):
            self._read()
        return bool(self._jobs)

    def answer(self, done: Done | Checked | Measured | Stepped) -> None:
        """Tell the loop what became of a batch, or of a measurement."""
        try:
            self._connection.send_bytes(encode(done))
        except OSError as error:
            raise HungUpError from error

    def _read(self) -> None:
        try:
            message = decode_to_replica(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise HungUpError from error
        if isinstance(message, Run):
            self._jobs.append(message)
        elif isinstance(message, Skip):
            for job in self._jobs:
                if job.number == message.number:
                    job.skipped += message.requests
            if self.skip is not None:
                self.skip(message)
        elif isinstance(message, Measure) and self._measure is not None:
            self.answer(self._measure(message))
        else:
            raise HungUpError


class Pipeline:
    """Runs what the loop sends, at most two batches at a time, and answers in order."""

    def __init__(self, runner: Runner, inbox: Inbox) -> None:
        self._runner = runner
        self._inbox = inbox
        self._unchecked: deque[Run] = deque()
        self._flight: Flight | None = None

    def turn(self) -> None:
        """Take the next batch, or answer one. Raises HungUpError, or DeviceLost where no forward can succeed."""
        flight = self._flight
        if flight is None:
            self._flight = self._begin(self._inbox.next(), beside=False)
            self._answer_unchecked()
            return
        job = self._next(lambda: self._runner.is_done(flight)) if self._runner.may_overlap(flight) else None
        following = None if job is None else self._begin(job, beside=True)
        done = self._runner.finish(flight)
        if flight.job.check and self._runner.canary is not None:
            self._inbox.answer(self._runner.canary.judge(flight.job, done))
        else:
            failpoints.hit("replica_after_run")
            self._inbox.answer(done)
        self._answer_unchecked()
        self._flight = following
        if following is not None:
            self._runner.resume(following)

    def _answer_unchecked(self) -> None:
        """Answer for canaries that could not be staged, in their turn."""
        while self._unchecked:
            self._inbox.answer(Checked(self._unchecked.popleft().number))

    def _begin(self, job: Run, *, beside: bool) -> Flight | None:
        if job.check:
            staged = self._runner.canary.stage(job) if self._runner.canary is not None else None
            if staged is None:
                self._unchecked.append(job)
                return None
            return self._runner.begin(staged, beside=beside)
        failpoints.hit("replica_before_run")
        return self._runner.begin(job, beside=beside)

    def _next(self, is_done: Callable[[], bool]) -> Run | None:
        """Return the next batch if it comes before the one that computes is done."""
        wait = 0.0
        while not self._inbox.has_batch(wait):
            if is_done():
                return None
            wait = _LOOK_SECONDS
        return self._inbox.next()
