"""Continuous batching in the replica: rows join and leave between two steps, and a failure costs whoever causes it.

Runs on the replica's one thread, in place of `pipeline`, for a model that runs in steps. With `batch.dispatch: static`
nobody joins what runs. What differs from a batch is only who runs together: staging, outcomes and errors are those of
`runner`. A failure is kept as text, and dealt with outside of the `except` block, whose frames hold the states.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from forebay import failpoints
from forebay.inference.answering import Desk, guarded
from forebay.inference.cohorts import Cohorts, Member, Row, halves
from forebay.inference.completion import too_long
from forebay.inference.messages import Checked, Done, Run, Skip, Stepped
from forebay.inference.pipeline import Inbox
from forebay.inference.runner import Runner
from forebay.inference.steps import Steps
from forebay.records import Code

_TELL_SECONDS = 0.1
_ANY_BUCKET = 1 << 62
"""Rows of all lengths run together, so what fits is one number."""


class Stepping:
    """The rows of one replica. `answer` takes what goes back to the loop."""

    def __init__(self, runner: Runner, steps: Steps, answer: Callable[[Done | Checked | Stepped], None]) -> None:
        self._runner = runner
        self._steps = steps
        self._answer = answer
        self._desk = Desk(runner, steps, answer)
        self._jobs: deque[Run] = deque()
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._cohorts = Cohorts()
        self._saved: dict[int, Any] | None = None
        self._told_at = time.perf_counter()
        self._told = Stepped(0, 0, 0, 0.0, 0)

    def turn(self, inbox: Inbox) -> None:
        """Take in what the loop has said, waiting for it where nothing runs; then run one step."""
        if not self.is_busy:
            self.take(inbox.next())
        for job in inbox.rest():
            self.take(job)
        self.advance()

    @property
    def is_busy(self) -> bool:
        """Whether something runs or waits."""
        return bool(self._jobs or self._desk.works)

    def take(self, job: Run) -> None:
        """Let a job wait for its turn."""
        self._jobs.append(job)

    def skip(self, message: Skip) -> None:
        """Forget requests that were answered already; they leave before the next step."""
        for job in self._jobs:
            if job.number == message.number:
                job.skipped += message.requests
        self._desk.skip(message)

    def advance(self) -> None:
        """Let rows join, run one step, and answer what has ended."""
        self._sweep()
        if self._cohorts:
            rows = self._cohorts.next(self._running)
            if rows is not None:
                self._begin(rows)
        if not self._cohorts:
            self._admit()
        if self._running:
            failpoints.hit("replica_before_run")
            self._step()
            failpoints.hit("replica_after_run")
        self._sweep()
        self._tell()

    def _sweep(self) -> None:
        """Let go of rows that have ended."""
        self._running = [row for row in self._running if row.goes_on]
        self._cohorts.parked = [row for row in self._cohorts.parked if row.goes_on]
        if any(not row.goes_on for row in self._waiting):
            self._waiting = deque(row for row in self._waiting if row.goes_on)

    # ------------------------------------------------------------------ joining

    def _admit(self) -> None:
        """Let rows join while there is room."""
        limit = self._runner.memory_caps.rows(_ANY_BUCKET)
        while self._jobs and len(self._running) + len(self._waiting) < limit:
            if self._desk.works and not self._steps.continuous:
                break
            self._stage(self._jobs.popleft())
        joining: list[Row] = []
        while self._waiting and len(self._running) + len(joining) < limit:
            row = self._waiting.popleft()
            if row.goes_on:
                joining.append(row)
        self._begin(joining)

    def _stage(self, job: Run) -> None:
        """Read a job's requests out of its slot."""
        if job.check:
            self._check(job)
            return
        self._waiting += self._desk.open(job)

    def _check(self, job: Run) -> None:
        canary = self._runner.canary
        staged = canary.stage(job) if canary is not None else None
        if canary is None or staged is None:
            self._answer(Checked(job.number))
        else:
            self._answer(canary.judge(staged, self._runner.run(staged)))

    def _begin(self, rows: list[Row]) -> None:
        """Begin rows that join, those of a kind in one call."""
        kinds: dict[Any, list[Row]] = {}
        for row in rows:
            kinds.setdefault(self._steps.shapes_of(row.inputs), []).append(row)
        for kind in kinds.values():
            self._begin_together(kind)

    def _begin_together(self, rows: list[Row]) -> None:
        states: list[Any] = []
        began = time.perf_counter()
        failure = guarded(self._runner, lambda: states.extend(self._steps.begin([row.inputs for row in rows])))
        self._charge(rows, time.perf_counter() - began)
        if failure is None:
            for row, state in zip(rows, states, strict=True):
                row.state = state
            self._running += rows
            return
        code, message = failure
        if code is Code.RESOURCE_EXHAUSTED:
            self._cannot_begin(rows, message)
            return
        several = len({row.member for row in rows}) > 1
        if several:
            for half in halves(rows):
                self._begin_together(half)
        else:
            self._desk.has_proof = bool(self._running or self._cohorts.parked)
            self._desk.fail(rows[0].member, code, message)

    # ------------------------------------------------------------------ stepping

    def _step(self) -> None:
        rows = self._running
        found: list[list[Any] | None] = []
        began = time.perf_counter()
        failure = guarded(self._runner, lambda: found.extend(self._steps.step([row.state for row in rows])))
        seconds = time.perf_counter() - began
        self._charge(rows, seconds)
        if failure is not None:
            self._failed(*failure)
            return
        self._desk.has_proof = True
        company = len(rows) > 1
        self._told.steps += 1
        self._told.row_steps += len(rows)
        self._told.seconds += seconds
        for row, outputs in zip(rows, found, strict=True):
            row.steps += 1
            row.had_company = row.had_company or company
            if outputs is not None:
                row.outputs, row.state = outputs, None
                row.member.work.flight.done.rows = len(rows)
        for row in rows:
            if row.outputs is not None and not row.member.has_ended:
                if all(one.outputs is not None for one in row.member.rows):
                    self._deliver(row.member)
            elif row.steps >= self._steps.most and row.goes_on:
                self._desk.fail(row.member, Code.MODEL_ERROR, too_long(self._steps.most))

    def _charge(self, rows: list[Row], seconds: float) -> None:
        """Charge each row its share of a call, so that the shares of all add up to the time that passed."""
        share = seconds / len(rows)
        for row in rows:
            done = row.member.work.flight.done
            done.forward_seconds += share
            done.total_seconds += share

    def _failed(self, code: Code, message: str) -> None:
        """Find who made a step fail: its rows begin again, in halves that run apart."""
        rows, self._running = self._running, []
        if code is Code.RESOURCE_EXHAUSTED:
            self._has_no_room(rows, message)
            return
        if not self._cohorts:
            self._desk.has_proof = False
        if len({row.member for row in rows}) > 1:
            self._told.restarted += len(rows)
            self._cohorts.split(rows)
        else:
            self._desk.fail(rows[0].member, code, message)

    def _cannot_begin(self, rows: list[Row], message: str) -> None:
        """Let rows wait for which there was no memory: until others end, or in a smaller group."""
        others = len(self._running) + len(self._cohorts.parked)
        if len(rows) == 1 and not others:
            self._is_too_large(rows[0], message)
        else:
            self._wait(rows)
            self._learn(rows, others + len(rows), max(others, len(rows) // 2))

    def _has_no_room(self, rows: list[Row], message: str) -> None:
        """Let fewer rows run after a step had no memory: all begin again, the newest of them later."""
        others = self._cohorts.disband()
        if len(rows) == 1 and not others:
            self._is_too_large(rows[0], message)
        else:
            again = [row for row in (*others, *rows) if row.goes_on]
            self._told.restarted += len(again)
            self._wait(sorted(again, key=lambda row: row.member.work.flight.began))
            self._learn(rows, len(again), len(again) // 2)

    def _wait(self, rows: list[Row]) -> None:
        for row in rows:
            row.reset()
        self._waiting.extendleft(reversed(rows))

    def _learn(self, rows: list[Row], together: int, fits: int) -> None:
        caps = self._runner.memory_caps
        if self._saved is None:
            self._saved = caps.saved()
        for work in {row.member.work for row in rows}:
            work.flight.done.refused = 1
        caps.refused(0, together, fits)
        self._runner.recover()

    def _is_too_large(self, row: Row, message: str) -> None:
        """Answer a row that does not fit alone; the others need no cap for that."""
        if self._saved is not None:
            self._runner.memory_caps.restore(self._saved)
            self._saved = None
        row.member.work.flight.done.refused = 1
        row.reset()
        self._runner.recover()
        self._desk.fail(row.member, Code.RESOURCE_EXHAUSTED, message)

    def _deliver(self, member: Member) -> None:
        """Answer a request whose rows have ended; one that is not finite runs once more, alone."""
        if self._desk.write(member):
            # Requests are counted, not steps: a probe that fails costs all rows that run the steps they have taken.
            self._runner.memory_caps.ran(_ANY_BUCKET, member.work.flight.done.rows)
            self._saved = None
        elif not member.has_ended:
            self._cohorts.isolate(member, [row for row in self._running if row.goes_on])
            self._running = []

    def _tell(self) -> None:
        """Say how far this has got: now and then, and once nothing runs any more."""
        now = time.perf_counter()
        if now - self._told_at < _TELL_SECONDS and self.is_busy:
            return
        if not (self._told.steps or self._told.restarted):
            return
        told, self._told_at = self._told, now
        told.rows = len(self._running)
        self._told = Stepped(0, 0, 0, 0.0, 0)
        self._answer(told)
