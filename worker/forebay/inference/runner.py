"""The runner: one batch through one model, so that a failure costs only the requests that cause it.

Runs in the replica and imports torch. `begin` launches a batch and `finish` brings it home; on an accelerator another
one may be begun in between. A group of requests that fails is halved until the guilty ones stand alone; a row whose
output is not finite runs once more by itself. Errors are kept as text: a traceback would keep the batch's memory alive
through its frames.
"""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from forebay.errors import ModelError
from forebay.inference.caps import CLEAN, Caps
from forebay.inference.compilation import check as check_compilation
from forebay.inference.declared import ContractError
from forebay.inference.devices import Device, is_sticky
from forebay.inference.example import DeviceLost, Example
from forebay.inference.flights import Flight, Launch
from forebay.inference.forwarding import Forward
from forebay.inference.groups import Group, Inputs, bucket_of
from forebay.inference.launching import Launcher
from forebay.inference.loading import printable, where
from forebay.inference.messages import Done, Mistake, Part, Run, Start
from forebay.inference.model import Model, runs_in_steps
from forebay.inference.peaks import Peaks
from forebay.inference.preparation import Preparation
from forebay.inference.slots import Slot
from forebay.inference.steps import Steps
from forebay.records import Code

if TYPE_CHECKING:
    from forebay.inference.canary import Canary

_ASK_AFTER = 4
"""Requests that fail alone, with no success before, until the model itself is tried."""

_MEMORY_EVERY = 0.5


class Runner:
    """Runs the batches of one replica. Its thread alone calls it."""

    def __init__(self, model: Model, device: Device, start: Start, memory: mmap.mmap) -> None:
        self.device = device
        self._start = start
        self.memory = memory
        self.specs = list((start.takes_prepared and model.prepared) or model.inputs)
        self._fed = list(model.prepared)
        self._outputs = list(model.outputs)
        self.prepares = bool(model.prepared) and not start.takes_prepared
        self._preparation = Preparation(model, memory)
        self._example = Example()
        self.canary: Canary | None = None
        self.steps = Steps(model, start, device) if runs_in_steps(model) else None
        self.forward = Forward(model, start, device)
        self.memory_caps = Caps(start.max_batch_size)
        self.room_caps = Caps(start.max_batch_size)
        self.launcher = Launcher(device, self.forward, model.outputs, self.memory_caps)
        self._crowded = 0
        self._held = 0
        self.rehearsed: dict[int, Run] = {}
        self._finished_at = 0.0
        self._figures: dict[str, int] = {}
        self._figures_at = float("-inf")
        self._fallbacks = 0

    def may_overlap(self, flight: Flight) -> bool:
        """Whether a batch may be begun before the one in front of it, `flight`, is finished."""
        return self.device.overlaps and not self._crowded and not flight.waiting

    def predict(self, points: list[tuple[int, int, int]]) -> None:
        """Let batches go by the peaks that the warm-up measured, as (bucket, rows, bytes)."""
        self.launcher.peaks = Peaks(points, self.device.room())

    def remember(self, inputs: Callable[[], Inputs]) -> None:
        """Take the warm-up's example, one row that this model runs without an error as long as it is sound."""
        self._example = Example(lambda: self.trial(inputs(), 1), self._outputs)

    def trial(self, inputs: Inputs, rows: int) -> list[Any]:
        """Run rows that belong to no request; return their outputs on the host."""
        return self.launcher.trial(inputs, rows)

    def run(self, job: Run) -> Done:
        """Run a batch and say where in the slot its outputs are. Raises DeviceLost where no forward can succeed."""
        return self.finish(self.begin(job))

    def begin(self, job: Run, *, beside: bool = False) -> Flight:
        """Stage a batch and launch its first group. `beside` says that the batch before it is not finished."""
        flight, groups = self.stage(job)
        done = flight.done
        planned = [piece for group in groups for piece in group.within(self._limit(group.bucket))]
        parts = sum(-(-group.total // self.launcher.limit(group.bucket)) for group in planned)
        done.pieces = parts
        done.stage_seconds = time.perf_counter() - flight.began
        flight.waiting = planned[::-1]
        if not beside or (flight.waiting and self.launcher.fits_beside(flight.waiting[-1], self._held)):
            self.resume(flight, beside=beside)
        return flight

    def stage(self, job: Run) -> tuple[Flight, list[Group]]:
        """Read a batch out of its slot, and prepare it where that is done here; return who is to run together."""
        began = time.perf_counter()
        done = Done(job.number, [], [], 0.0, 0.0, 0.0, 0, {})
        slot = Slot(self.memory, job.slot * self._start.slot_bytes, self._start.input_bytes, self._start.slot_bytes)
        flight = Flight(job, done, slot, began, (self.memory_caps.saved(), self.room_caps.saved()))
        rows = job.rows or [1] * job.requests
        made = self._prepared(flight, rows) if self.prepares else [self._staged(flight, rows)]
        done.stage_seconds = time.perf_counter() - began
        return flight, [left for group in made if (left := group.without(job.skipped)) is not None]

    def resume(self, flight: Flight, *, beside: bool = False) -> None:
        """Launch what a batch waits with, unless it is launched: the device may not have had the memory before."""
        if flight.launch is None and flight.waiting:
            flight.launch = self.launcher.launch(flight, flight.waiting.pop(), beside)
            self._held = flight.launch.held

    def is_done(self, flight: Flight) -> bool:
        """Whether `finish` would have something to do at once."""
        return flight.launch is None or self.launcher.is_landed(flight.launch)

    def finish(self, flight: Flight) -> Done:
        """Bring a batch home: run what is left of it and what failed."""
        done = flight.done
        while flight.launch is not None or flight.waiting:
            launch, flight.launch = flight.launch, None
            if launch is not None and launch.failure is not None:
                self._failed(flight, launch, *launch.failure)
            elif launch is not None:
                self.launcher.land(flight, launch)
                self._keep(flight, launch)
            elif not self._leaves(flight, flight.waiting[-1]):
                flight.launch = self.launcher.launch(flight, flight.waiting.pop())
        if len(done.mistakes) >= flight.job.requests:
            self.is_unsound(done)
        self._learn(flight)
        now = time.perf_counter()
        done.total_seconds = now - max(flight.began, self._finished_at)  # not what it waited for the one in front
        self._finished_at = now
        done.memory = self.figures(now)
        return done

    def figures(self, now: float) -> dict[str, int]:
        """Return the bytes of the device and the process by kind, not older than half a second."""
        if now - self._figures_at >= _MEMORY_EVERY:  # asking a driver costs more than a small batch
            self._look_at_memory(now)
        return self._figures

    def recover(self) -> None:
        """Give memory back after an allocation failed; an exception of the model's own may hold some in a cycle."""
        gc.collect()
        self.device.recover()

    def _look_at_memory(self, now: float) -> None:
        self._figures, self._figures_at = {**self.device.memory(), "staging": len(self.memory)}, now
        peaks = self.launcher.peaks
        if peaks.room is not None:  # others may have taken memory of the device, or given some back
            peaks.room = self.device.room()
            self._figures["batch_room"] = peaks.room or 0

    def _prepared(self, flight: Flight, rows: list[int]) -> list[Group]:
        def failed(request: int, error: Exception) -> None:
            if is_sticky(error):
                raise DeviceLost(where(error)) from error
            mistake(flight, request, Code.MODEL_ERROR, f"prepare: {where(error)}")

        base = flight.job.slot * self._start.slot_bytes
        groups = self._preparation.run(flight.job, base, rows, failed)
        return [
            Group(requests, [rows[index] for index in requests], inputs, bucket_of(self._fed, inputs))
            for requests, inputs in groups
        ]

    def _staged(self, flight: Flight, rows: list[int]) -> Group:
        job = flight.job
        inputs = {spec.name: flight.slot.read(spec, place) for spec, place in zip(self.specs, job.inputs, strict=True)}
        return Group(range(job.requests), rows, inputs, job.bucket)

    def _limit(self, bucket: int) -> int:
        return min(self.launcher.limit(bucket), self.room_caps.rows(bucket))

    def _keep(self, flight: Flight, launch: Launch) -> None:
        """Say where the outputs of a group are; let rows that are not finite run alone."""
        group, finite = launch.group, launch.finite()
        flight.ran[group.bucket] = max(flight.ran.get(group.bucket, 0), launch.rows)
        if finite is not None and len(group.requests) == 1:
            flight.slot.position = launch.since
            mistake(flight, group.requests[0], Code.NON_FINITE_OUTPUT, "an output has NaN or infinity")
            return
        flight.bytes_per_row = (flight.slot.position - launch.since) / group.total
        flight.done.parts.append(Part(list(group.requests), [place for place in launch.placed if place is not None]))
        if finite is None:
            return
        begin, alone = 0, []
        for position, count in enumerate(group.rows):
            if not all(finite[begin : begin + count]):
                alone.append(group.cut(position, position + 1))
            begin += count
        flight.waiting += reversed(alone)

    def _failed(self, flight: Flight, launch: Launch, code: Code, message: str) -> None:
        """Cut a group that failed, or find its one request guilty."""
        group, done = launch.group, flight.done
        several = len(group.requests) > 1
        flight.slot.position = launch.since
        if code is Code.RESOURCE_EXHAUSTED:
            if self._makes_room(flight, launch):
                return
        elif code is Code.RESULT_TOO_LARGE and done.parts:
            done.left += group.requests  # the others took the room: these run again, without them
            return
        elif code is Code.RESULT_TOO_LARGE and several:
            flight.clean = False
            self.room_caps.refused(group.bucket, group.total, int(group.total * launch.fits))
            flight.waiting += reversed(group.within(min(self._limit(group.bucket), group.total - 1)))
            return
        elif several:
            flight.waiting += reversed(group.halves())
            return
        if code is Code.RESULT_TOO_LARGE:  # it alone is so large: the others need no cap for that
            self.room_caps.restore({})
        mistake(flight, group.requests[0], code, message)
        if len(done.mistakes) == _ASK_AFTER and not done.parts and self.is_unsound(done):
            for waiting in flight.waiting:  # halving on would find every request guilty of the model's fault
                for request in waiting.requests:
                    mistake(flight, request, code, message)
            flight.waiting.clear()

    def _makes_room(self, flight: Flight, launch: Launch) -> bool:
        """Learn from an allocation that failed and let smaller pieces run; False where one row alone did not fit."""
        group = launch.group
        flight.done.refused += 1
        if launch.beside:  # perhaps it fits where the batch before is gone
            self._crowded = CLEAN
            flight.waiting.append(group)
            return True
        self.recover()
        flight.clean = False
        if launch.rows > 1:
            self.memory_caps.refused(group.bucket, launch.rows)
            flight.waiting += reversed(group.within(self._limit(group.bucket)))
            return True
        if len(group.requests) > 1:
            flight.waiting += reversed(group.halves())
            return True
        self.memory_caps.restore(flight.saved[0])  # it alone needs so much: the others need no cap for that
        return False

    def _leaves(self, flight: Flight, group: Group) -> bool:
        """Leave a group for the next slot where what ran shows that this one has no room for it."""
        if not flight.done.parts or not self.room_caps.known(group.bucket):
            return False
        if group.total * flight.bytes_per_row <= flight.slot.room:
            return False
        flight.done.left += flight.waiting.pop().requests
        return True

    def _learn(self, flight: Flight) -> None:
        """Count a clean batch, and tell the loop what is known of its bucket."""
        self._crowded = max(self._crowded - 1, 0)
        done = flight.done
        done.pieces = min(done.pieces, done.executions) if min(done.pieces, done.executions) > 1 else 0
        for bucket, rows in flight.ran.items():
            for caps in (self.memory_caps, self.room_caps):
                if flight.clean:
                    caps.ran(bucket, rows)
            predicted = self.launcher.peaks.bound(bucket, self._start.max_batch_size)
            for known in (self.memory_caps.known(bucket), self.room_caps.known(bucket), predicted):
                done.cap = min(done.cap, known) if done.cap and known else done.cap or known
        if self.forward.compiled is not None:
            fallbacks = self.forward.compiled.fallbacks
            done.recompiles, self._fallbacks = fallbacks - self._fallbacks, fallbacks

    def is_unsound(self, done: Done) -> bool:
        """Whether the model fails its own example, too; `done.unsound` says how."""
        if not done.unsound and any(mistake.code != Code.RESULT_TOO_LARGE for mistake in done.mistakes):
            done.unsound = self._example.complaint()
            if done.unsound:  # it may have run out of memory; emptying the cache holds the device up
                self.device.recover()
        return bool(done.unsound)

    def close(self) -> None:
        """Let go of the staging memory: nothing runs any more."""
        self.device.unpin(self.memory)


def mistake(flight: Flight, request: int, code: Code, message: str) -> None:
    flight.done.mistakes.append(Mistake(request, code.value, printable(message[:500])))


def check_model_contract(error: Exception, mend: str = "") -> ModelError:
    """Return what a failed warm-up means for the start, and what mends it where that is known."""
    return check_compilation(error) or ModelError(
        f"the model failed its warm-up: {str(error) if isinstance(error, ContractError) else where(error)}{mend}"
    )
