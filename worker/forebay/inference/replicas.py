"""One replica as the loop sees it: its transport, its staging slots, and the batches that it has. No torch."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING

from forebay.inference.messages import (
    Checked,
    Done,
    Failed,
    Part,
    Ready,
    Run,
    Skip,
    Stage,
    Start,
    Stepped,
    decode_to_loop,
    encode,
)
from forebay.inference.progress import Progress
from forebay.inference.staging import Staging
from forebay.inference.transports import Transport
from forebay.records import Batch, Output, Request, Signature, TensorShape

if TYPE_CHECKING:
    from forebay.inference.soundness import Doubt

_OVERDUE_SECONDS = 30.0


class State(Enum):
    """Where a replica is in its life. One that retires finishes what it has and gets no more."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    RETIRING = "retiring"


class Replica:
    """A replica of one model. `start` says what it loads; a transport may be launched more than once."""

    def __init__(self, name: str, start: Start, transport: Transport, staging: Staging) -> None:
        self.name = name
        self.model = start.model
        self.transport = transport
        self.state = State.DOWN
        self.relaunch_at = 0.0
        self.device = ""
        self.running: deque[tuple[Batch, Run]] = deque()
        self.memory: dict[str, int] = {}
        self.signature: Signature | None = None
        self.doubt: Doubt | None = None
        self.failures = 0  # canaries in a row that ended in an error
        self.deaths = 0  # since its last batch
        self.idle_since = 0.0
        self.progress = Progress()
        self._most_rows = 0  # that run and wait at once, of a model whose rows join what runs; 0: it runs batches
        self._staged: Signature | None = None
        self._answer: list[bytes] = []
        self._start = start
        self._staging = staging
        self._since = 0.0
        self._stage = ""

    @property
    def is_idle(self) -> bool:
        """Whether it could run a batch this moment."""
        return self.state is State.READY and not self.running and self.doubt is None

    @property
    def free_at(self) -> float:
        """The time at which it can begin another batch, as predicted: 0 while it is idle, never where nobody knows.

        A canary holds nobody up: what comes is staged behind it at once.
        """
        if self._most_rows:
            return 0.0
        expected = [batch.expected for batch, job in self.running if not job.check]
        if not expected:
            return 0.0
        return self._since + sum(expected) if all(expected) else float("inf")

    @property
    def busy_since(self) -> float | None:
        """When it began what it runs; None while it is idle, or runs in steps: others run beside it then."""
        return self._since if self.running and not self._most_rows else None

    @property
    def expected(self) -> float:
        """The seconds that what it has is predicted to take."""
        return sum([batch.expected for batch, _ in self.running])

    @property
    def has_room(self) -> bool:
        """Whether a batch can be staged, to run now or next."""
        is_full = self._most_rows and sum([batch.rows for batch, _ in self.running]) >= self._most_rows
        return self.state is State.READY and self._staging.free > 0 and self.doubt is None and not is_full

    @property
    def behind(self) -> list[Batch]:
        """The batches of which requests can still be taken out: all but the one that runs, or all where rows leave."""
        return [batch for batch, _ in (self.running if self._most_rows else list(self.running)[1:])]

    @property
    def begun(self) -> list[Batch]:
        """The batches that may have been begun, in order: the first one, or as many as have rows that run in steps."""
        found: list[Batch] = []
        for batch, _ in self.running:
            if not found or sum(one.rows for one in found) < self._start.max_batch_size * bool(self._most_rows):
                found.append(batch)
        return found

    @property
    def answers_at_once(self) -> bool:
        """Whether its answer is there already, and nothing is to be waited for."""
        if self.state is State.DOWN or self.transport.descriptor() is not None:
            return False
        return self.state is State.STARTING or bool(self.running)

    def launch(self, now: float) -> None:
        """Start it; the model loads in the background."""
        self._staging.reset()
        self.transport.launch()
        self.state, self._stage = State.STARTING, "starting its process"
        self._since = self.idle_since = now
        self.transport.send(encode(self._start))

    def submit(self, batch: Batch, now: float) -> None:
        """Write a batch into a slot and tell the replica. Raises OSError where it is gone."""
        assert self._staged is not None
        job = self._staging.write(batch, self._staged)
        if not self.running:
            self._since = now
        self.running.append((batch, job))
        self.transport.send(encode(job))

    def check(self, batch: Batch, now: float) -> None:
        """Ask for the canary, for which `batch` stands. Raises OSError where the replica is gone."""
        job = Run(batch.number, self._staging.take(), 1, [], [], [], check=True)
        self._since = now
        self.running.append((batch, job))
        self.transport.send(encode(job))

    def checked(self, checked: Checked, now: float) -> None:
        """Take in that the canary has run."""
        _, job = self._came_back(checked.number)
        self._since = self.idle_since = now
        self.memory = checked.memory or self.memory
        self._staging.release(job.slot)

    def distrust(self) -> None:
        """Let the next replicas of the model start only if they answer the canary as this one did at its start."""
        self._start.known = self._start.known or self._answer

    def answer_early(self, late: Callable[[Request], bool]) -> list[Request]:
        """Return requests that can still be taken out and are answered now; the replica is told to skip them."""
        found: list[Request] = []
        for batch in self.behind:
            picked = [
                index
                for index, request in enumerate(batch.requests)
                if late(request) and id(request) not in batch.answered
            ]
            if picked:
                found += [batch.requests[index] for index in picked]
                batch.answered.update(id(batch.requests[index]) for index in picked)
                self._leave_out(batch, picked)
        return found

    def stop_steps(self, unwanted: Callable[[Request], bool]) -> None:
        """Tell the replica to leave out requests that `unwanted` picks, where rows join what runs."""
        for batch in self.behind if self._most_rows else ():
            if picked := [index for index, request in enumerate(batch.requests) if unwanted(request)]:
                self._leave_out(batch, picked)

    def _leave_out(self, batch: Batch, picked: list[int]) -> None:
        with contextlib.suppress(OSError):  # a replica that is gone is noticed where it is listened to
            self.transport.send(encode(Skip(batch.number, picked)))

    def messages(self, now: float) -> Iterator[Ready | Failed | Done | Checked | Stage]:
        """Yield what the replica has said. Raises EOFError where it is gone."""
        while (raw := self.transport.receive()) is not None:
            message = decode_to_loop(raw)
            if isinstance(message, Stage):
                self._stage = message.name.replace("_", " ")
            if isinstance(message, Stepped):
                self.progress.add(message, now)
            else:
                yield message

    def became_ready(self, ready: Ready) -> Signature:
        """Take over what the replica says of its model."""
        self.state = State.READY
        self.device = ready.device
        self._answer = ready.answer
        if ready.slots:
            self._staging.divide(self._start)
            self._most_rows = self._staging.slots - 1  # one is the canary's
        inputs, outputs, prepared = (
            tuple(TensorShape(spec.name, spec.datatype, tuple(spec.shape), spec.pad) for spec in declared)
            for declared in (ready.inputs, ready.outputs, ready.prepared)
        )
        room = self._staging.room(len(prepared or inputs)) if ready.slots else 0
        self.signature = Signature(self.model, self._start.version, inputs, outputs, ready.prepares, prepared, room)
        self._staged = Signature(self.model, self._start.version, prepared, outputs) if prepared else self.signature
        return self.signature

    def _came_back(self, number: int) -> tuple[Batch, Run]:
        """Remove and return what `number` is about; rows that run in steps come back in any order."""
        found = next(pair for pair in self.running if pair[1].number == number)
        self.running.remove(found)
        return found

    def take(self, done: Done, now: float) -> tuple[Batch, list[tuple[Part, list[Output]]]]:
        """Return the batch that `done` is about with its outputs, copied out of the slot, which is free again."""
        batch, job = self._came_back(done.number)
        assert self.signature is not None
        self._since = self.idle_since = now
        self.memory = done.memory
        parts: list[tuple[Part, list[Output]]] = []
        for part in done.parts:
            outputs = [
                Output(tuple(place.dims[1:]), self._staging.read(job.slot, place, spec.datatype == "BYTES"))
                for spec, place in zip(self.signature.outputs, part.outputs, strict=True)
            ]
            parts.append((part, outputs))
        self._staging.release(job.slot)
        return batch, parts

    def _heard_at(self) -> float:
        return max(self._since, self.progress.told_at)

    def late(self, now: float, execution_timeout: float, start_timeout: float) -> str | None:
        """Say what takes too long; None if nothing does."""
        if self.state is State.STARTING and now - self._since > start_timeout:
            within = f"inference.start_timeout_ms ({start_timeout * 1000:.0f} ms)"
            return (
                f"the model was not ready within {within} and got as far as {self._stage}; raise it if that takes so "
                "long, else see what load() or forward() waits for"
            )
        if self.running and now - self._heard_at() > execution_timeout:
            what = "its canary" if self.running[0][1].check else "a batch"
            return f"{what} took longer than inference.execution_timeout_ms ({execution_timeout * 1000:.0f} ms)"
        return None

    def overdue(self, now: float, execution_timeout: float) -> str | None:
        """Say that it runs far beyond its time; None mostly: one that is late is replaced."""
        if not self.running or now - self._heard_at() <= 2 * execution_timeout + _OVERDUE_SECONDS:
            return None
        what = "its canary" if self.running[0][1].check else "one batch"
        return f"replica {self.name} has run {what} for {now - self._since:.0f} s and was not replaced"

    def retire(self) -> None:
        """Take no more batches."""
        self.state = State.RETIRING

    def down(self, relaunch_at: float) -> None:
        """Note that it is gone; its batches are somebody else's now. One that retires is not launched again."""
        if self.state is not State.RETIRING:
            self.state = State.DOWN
        self.relaunch_at = relaunch_at
        self.running.clear()
        self.progress.rows = 0
        self.doubt, self.failures = None, 0

    def stop(self) -> None:
        """End it and give the staging memory back."""
        self.transport.stop()
        self.state = State.DOWN
        self._staging.close()
