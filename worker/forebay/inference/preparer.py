"""A preparer's own side: run the model's `prepare`, request by request, until the loop hangs up.

A process of its own, forked or spawned, that talks, ignores signals and dies with the loop just as a replica does. It
imports torch and never runs `forward`: it has what `load_prepare` made, on the CPU, with one thread, because the cores
belong to the preparers beside it.
"""

from __future__ import annotations

import mmap
import time
from functools import partial
from typing import Any, NoReturn

import torch

from forebay.errors import ForebayError, ModelError
from forebay.inference.devices.cpu import resident_bytes
from forebay.inference.loading import load_prepare, printable, where
from forebay.inference.messages import Done, Failed, Mistake, Part, Placed, Ready, Run, Spec, Start
from forebay.inference.model import Model, TensorSpec
from forebay.inference.preparation import Inputs, Preparation
from forebay.inference.processes import be_a_process, name_process
from forebay.inference.replica import serve
from forebay.inference.samples import given_input
from forebay.inference.slots import NoRoomError, Slot
from forebay.inference.staging import join_elements
from forebay.records import Code


class Preparer:
    """Prepares the requests of a slot one after the other and puts what they became behind them in the slot."""

    def __init__(self, model: Model, start: Start, memory: mmap.mmap) -> None:
        self._model = model
        self._fed = list(model.prepared)
        self._start = start
        self._memory = memory
        self._preparation = Preparation(model, memory)

    def run(self, job: Run) -> Done:
        """Prepare the requests of a slot; what one of them raises is its own mistake."""
        began = time.perf_counter()
        base = job.slot * self._start.slot_bytes
        slot = Slot(self._memory, base, self._start.input_bytes, self._start.slot_bytes)
        rows = job.rows or [1] * job.requests
        done = Done(job.number, [], [], 0.0, 0.0, 0.0, job.requests, {"resident": resident_bytes()})
        for index, inputs in enumerate(self._preparation.requests(job, base)):
            started = time.perf_counter()
            done.costs.append(self._run_one(done, slot, index, (inputs, rows[index])))
            done.seconds.append(time.perf_counter() - started)
        done.total_seconds = time.perf_counter() - began
        if len(done.mistakes) >= job.requests and any(one.code != Code.TOO_LARGE for one in done.mistakes):
            done.unsound = self._complaint()
        return done

    def _complaint(self) -> str:
        """Say why the model cannot even prepare its own example; empty where it can, or has none."""
        try:
            try_out(self._model, self._memory)
        except ModelError as error:
            return str(error)
        return ""

    def _run_one(self, done: Done, slot: Slot, index: int, given: tuple[Inputs, int]) -> float:
        """Prepare one request; return its cost, 0 where nothing is said."""
        before = slot.position
        try:
            prepared, cost = self._preparation.prepare(*given)
            placed = [self._put(slot, spec, prepared[spec.name]) for spec in self._fed]
        except NoRoomError:
            slot.position = before
            if done.parts:
                done.left.append(index)  # the others took the room: it runs again, without them
            else:
                message = "prepare: what it made has more bytes than batch.max_batch_bytes allows"
                done.mistakes.append(Mistake(index, Code.TOO_LARGE.value, message))
        except Exception as error:
            slot.position = before
            message = printable(f"prepare: {where(error)}"[:500])
            done.mistakes.append(Mistake(index, Code.MODEL_ERROR.value, message))
        else:
            done.parts.append(Part([index], placed))
            return cost or 0.0
        return 0.0

    def _put(self, slot: Slot, spec: TensorSpec, value: Any) -> Placed:
        if spec.datatype == "BYTES":
            elements = [element.encode() if isinstance(element, str) else bytes(element) for element in value]
            return slot.write(join_elements(elements), len(elements), slot.position)
        placed, place = slot.place(spec, list(value.shape), slot.position)
        place.copy_(value)
        return placed


def begin(start: Start, memory: mmap.mmap) -> tuple[Ready | Failed, Preparer | None]:
    """Load what `prepare` needs and try it out; return what to tell the loop, and the preparer if there is one."""
    began = time.perf_counter()
    try:
        model = load_prepare(start)
        loaded = time.perf_counter()
        tried = try_out(model, memory)
    except ForebayError as error:
        return Failed(str(error)), None
    except Exception as error:
        return Failed(f"the preparer could not start: {where(error)}"), None
    ready = Ready(
        inputs=[_spec(spec) for spec in model.inputs],
        outputs=[_spec(spec) for spec in model.prepared],
        prepares=True,
        device="cpu",
        load_seconds=loaded - began,
        warm_up_seconds=time.perf_counter() - loaded,
        curve=[(0, 1, tried)] if tried is not None else [],
        notes=[],
    )
    return ready, Preparer(model, start, memory)


def try_out(model: Model, memory: mmap.mmap) -> float | None:
    """Prepare the model's example twice; return the seconds of the second time, None without an example.

    Raises ModelError where it fails: every request would.
    """
    try:
        given = model.example()
        if given is None:
            return None
        inputs = {spec.name: given_input(spec, given) for spec in model.inputs}
        rows = len(next(iter(inputs.values())))
        preparation = Preparation(model, memory)
        preparation.prepare(inputs, rows)
        began = time.perf_counter()
        preparation.prepare(inputs, rows)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__}.prepare() fails for its own example() in a process of its own: {where(error)}; "
            "load_prepare() must build what it needs"
        ) from error
    return time.perf_counter() - began


def _spec(spec: TensorSpec) -> Spec:
    return Spec(spec.name, spec.datatype, list(spec.shape), spec.pad)


def run(connection: int, memory: int) -> NoReturn:
    """Be a preparer, with the descriptors of its connection and of its staging memory."""
    name_process("forebay-prepare")
    torch.set_num_threads(1)
    torch.default_generator.seed()  # as a replica
    be_a_process(partial(serve, begin=begin), connection, memory)
