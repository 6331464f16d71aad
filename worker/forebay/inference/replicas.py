"""One replica as the loop sees it: its transport, its staging slots, and the batches that it has. No torch."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    decode_to_loop,
    encode,
)
from forebay.inference.staging import Staging
from forebay.inference.transports import Transport
from forebay.records import Batch, Code, Failure, Output, Request, Signature, TensorShape, Timings

if TYPE_CHECKING:
    from forebay.inference.soundness import Doubt


_OVERDUE_SECONDS = 30.0


class State(Enum):
    """Where a replica is in its life. One that retires finishes what it has and gets no more."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    RETIRING = "retiring"


@dataclass(slots=True)
class Finished:
    """A batch that came back: outputs of requests that ran together, and the failures of the others.

    `seconds` and `costs` are a preparer's, by index of the batch's requests: see `messages.Done`. `unsound` is why the
    model fails its own example where every request failed. `signature` is that of the replica which ran it.
    """

    batch: Batch
    results: list[tuple[list[Request], list[Output]]]
    failures: list[tuple[Request, Failure]]
    timings: Timings = field(default_factory=Timings)
    left: list[Request] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    unsound: str = ""
    signature: Signature | None = None


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
        expected = [batch.expected for batch, job in self.running if not job.check]
        if not expected:
            return 0.0
        return self._since + sum(expected) if all(expected) else float("inf")

    @property
    def busy_since(self) -> float | None:
        """When it began what it runs; None while it is idle."""
        return self._since if self.running else None

    @property
    def expected(self) -> float:
        """The seconds that what it has is predicted to take."""
        return sum([batch.expected for batch, _ in self.running])

    @property
    def has_room(self) -> bool:
        """Whether a batch can be staged, to run now or next."""
        return self.state is State.READY and self._staging.free > 0 and self.doubt is None

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
        _, job = self.running.popleft()
        assert job.number == checked.number
        self._since = self.idle_since = now
        self.memory = checked.memory or self.memory
        self._staging.release(job.slot)

    def distrust(self) -> None:
        """Let the next replicas of the model start only if they answer the canary as this one did at its start."""
        self._start.known = self._start.known or self._answer

    def answer_early(self, late: Callable[[Request], bool]) -> list[Request]:
        """Return requests of batches that were not begun and are answered now; the replica is told to skip them."""
        found: list[Request] = []
        for batch, _ in list(self.running)[1:]:
            picked = [
                index
                for index, request in enumerate(batch.requests)
                if late(request) and id(request) not in batch.answered
            ]
            if picked:
                found += [batch.requests[index] for index in picked]
                batch.answered.update(id(batch.requests[index]) for index in picked)
                with contextlib.suppress(OSError):  # a replica that is gone is noticed where it is listened to
                    self.transport.send(encode(Skip(batch.number, picked)))
        return found

    def messages(self) -> Iterator[Ready | Failed | Done | Checked | Stage]:
        """Yield what the replica has said. Raises EOFError where it is gone."""
        while (raw := self.transport.receive()) is not None:
            message = decode_to_loop(raw)
            if isinstance(message, Stage):
                self._stage = message.name.replace("_", " ")
            yield message

    def became_ready(self, ready: Ready) -> Signature:
        """Take over what the replica says of its model."""
        self.state = State.READY
        self.device = ready.device
        self._answer = ready.answer
        inputs, outputs, prepared = (
            tuple(TensorShape(spec.name, spec.datatype, tuple(spec.shape), spec.pad) for spec in declared)
            for declared in (ready.inputs, ready.outputs, ready.prepared)
        )
        self.signature = Signature(self.model, self._start.version, inputs, outputs, ready.prepares, prepared)
        self._staged = Signature(self.model, self._start.version, prepared, outputs) if prepared else self.signature
        return self.signature

    def take(self, done: Done, now: float) -> tuple[Batch, list[tuple[Part, list[Output]]]]:
        """Return the batch that `done` is about with its outputs, copied out of the slot, which is free again."""
        batch, job = self.running.popleft()
        assert job.number == done.number
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

    def late(self, now: float, execution_timeout: float, start_timeout: float) -> str | None:
        """Say what takes too long; None if nothing does."""
        if self.state is State.STARTING and now - self._since > start_timeout:
            within = f"inference.start_timeout_ms ({start_timeout * 1000:.0f} ms)"
            return (
                f"the model was not ready within {within} and got as far as {self._stage}; raise it if that takes so "
                "long, else see what load() or forward() waits for"
            )
        if self.running and now - self._since > execution_timeout:
            what = "its canary" if self.running[0][1].check else "a batch"
            return f"{what} took longer than inference.execution_timeout_ms ({execution_timeout * 1000:.0f} ms)"
        return None

    def overdue(self, now: float, execution_timeout: float) -> str | None:
        """Say that it runs far beyond its time; None mostly: one that is late is replaced."""
        if not self.running or now - self._since <= 2 * execution_timeout + _OVERDUE_SECONDS:
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
        self.doubt, self.failures = None, 0

    def stop(self) -> None:
        """End it and give the staging memory back."""
        self.transport.stop()
        self.state = State.DOWN
        self._staging.close()


def finished(replica: Replica, done: Done, now: float) -> Finished:
    """Match what a replica did to the requests of the batch, by index: a later part replaces an earlier one."""
    batch, parts = replica.take(done, now)
    requests = batch.requests
    timings = Timings(
        done.stage_seconds,
        done.forward_seconds,
        done.total_seconds,
        done.executions,
        done.pieces,
        done.cap or None,
        done.recompiles,
        done.refused,
    )
    failed = {mistake.request: Failure(Code(mistake.code), mistake.message) for mistake in done.mistakes}
    answered = {index for index, one in enumerate(requests) if id(one) in batch.answered} if batch.answered else set()
    failures = [(requests[index], failure) for index, failure in failed.items() if index not in answered]
    left = [requests[index] for index in done.left if index not in answered]
    if len(parts) == 1 and not failed and not done.left and not answered:
        whole = [(requests, parts[0][1])]
        return Finished(batch, whole, failures, timings, [], done.seconds, done.costs, "", replica.signature)
    results: list[tuple[list[Request], list[Output]]] = []
    missing = set(range(len(requests))) - set(failed) - set(done.left) - answered
    for part, outputs in reversed(parts):
        begin = 0
        rows = sum(requests[index].rows for index in part.requests)
        for index in part.requests:
            end = begin + requests[index].rows
            if index in missing:
                missing.remove(index)
                results.append(([requests[index]], [_slice(output, begin, end, rows) for output in outputs]))
            begin = end
    lost = Failure(Code.INTERNAL, "the replica returned nothing for this request")
    failures += [(requests[index], lost) for index in sorted(missing)]
    told = (done.seconds, done.costs, done.unsound)
    return Finished(batch, results, failures, timings, left, *told, replica.signature)


def _slice(output: Output, begin: int, end: int, rows: int) -> Output:
    width = len(output.content) // rows
    return Output(output.dims, output.content[begin * width : end * width])
