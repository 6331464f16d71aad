"""The runner: one batch through one model, so that a failure costs only the requests that cause it.

Runs in the replica and imports torch. A group of requests that fails is halved until the guilty ones stand alone; a
row whose output is not finite runs once more by itself. Errors are kept as text: a traceback would keep the batch's
memory alive through its frames.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from forebay.errors import ModelError
from forebay.inference.declared import TORCH, ContractError, as_declared, finite_rows
from forebay.inference.devices import Device, is_out_of_memory, is_sticky
from forebay.inference.loading import printable, where
from forebay.inference.messages import Done, Mistake, Part, Placed, Run, Start
from forebay.inference.model import DATATYPE_BYTES, Model, TensorSpec
from forebay.inference.preparation import Inputs, Preparation
from forebay.inference.staging import join_elements, split_elements
from forebay.records import Code

_ALIGNMENT = 64
_COMPUTED_AS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DeviceLost(Exception):
    """The device is lost to this process; the replica must exit and be replaced."""


class _Room(Exception):
    """The outputs do not fit into the slot."""


class _Group:
    """Requests that run together: their indices in the batch, their rows, and their inputs as they were staged."""

    __slots__ = ("inputs", "requests", "rows")

    def __init__(self, requests: Sequence[int], rows: Sequence[int], inputs: Inputs) -> None:
        self.requests = requests
        self.rows = rows
        self.inputs = inputs

    def cut(self, first: int, last: int) -> _Group:
        """Return the group of the requests from `first` up to `last`."""
        begin, end = sum(self.rows[:first]), sum(self.rows[:last])
        inputs = {name: _rows_of(value, begin, end, sum(self.rows)) for name, value in self.inputs.items()}
        return _Group(self.requests[first:last], self.rows[first:last], inputs)


class Runner:
    """Runs the batches of one replica, one at a time."""

    def __init__(self, model: Model, device: Device, start: Start, memory: mmap.mmap) -> None:
        self._model = model
        self._device = device
        self._start = start
        self._memory = memory
        self._specs = list(model.inputs)
        self._outputs = list(model.outputs)
        self._prepares = bool(model.prepared)
        self._preparation = Preparation(model, memory)
        self._dtype = _COMPUTED_AS.get(start.precision)
        self._position = 0
        self._base = 0
        self._done = Done(0, [], [], 0.0, 0.0, 0.0, 0, {})

    def run(self, job: Run) -> Done:
        """Run a batch and say where in the slot its outputs are. Raises DeviceLost where no forward can succeed."""
        began = time.perf_counter()
        self._base = job.slot * self._start.slot_bytes
        self._position = self._start.input_bytes
        self._done = done = Done(job.number, [], [], 0.0, 0.0, 0.0, 0, {})
        rows = job.rows or [1] * job.requests
        groups = self._prepared(job, rows) if self._prepares else [self._staged(job, rows)]
        done.stage_seconds = time.perf_counter() - began
        for group in groups:
            self._execute(group)
        done.total_seconds = time.perf_counter() - began
        done.memory = self._device.memory()
        return done

    def forward(self, inputs: Inputs, rows: int) -> list[Any]:
        """Run the model on `rows` rows and return its outputs in declared order, checked."""
        limit = self._start.max_batch_size
        if rows <= limit:
            return self._forward(inputs, rows)
        pieces = []
        for begin in range(0, rows, limit):  # one request larger than a batch: in pieces, joined in row order
            end = min(begin + limit, rows)
            piece = {name: _rows_of(value, begin, end, rows) for name, value in inputs.items()}
            pieces.append(self._forward(piece, end - begin))
        return [_joined([piece[index] for piece in pieces]) for index in range(len(self._outputs))]

    def _forward(self, inputs: Inputs, rows: int) -> list[Any]:
        self._done.executions += 1
        if self._dtype is not None:
            inputs = {
                name: value.to(self._dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                for name, value in inputs.items()
            }
        began = time.perf_counter()
        with torch.inference_mode():
            returned = self._model.forward(**inputs)
        self._done.forward_seconds += time.perf_counter() - began
        return self._checked(returned, rows)

    def _checked(self, returned: Any, rows: int) -> list[Any]:
        """Match what forward returned to the declared outputs; a positional guess is never made."""
        name = type(self._model).__name__
        if isinstance(returned, Mapping):
            named = returned
        elif len(self._outputs) == 1:
            named = {self._outputs[0].name: returned}
        else:
            raise ContractError(f"{name}.forward() must return a dict with {[spec.name for spec in self._outputs]}")
        found = []
        for spec in self._outputs:
            if spec.name not in named:
                raise ContractError(f"{name}.forward() returned no output {spec.name!r}")
            found.append(as_declared(spec, named[spec.name], rows))
        return found

    def _prepared(self, job: Run, rows: list[int]) -> list[_Group]:
        def failed(request: int, error: Exception) -> None:
            if is_sticky(error):
                raise DeviceLost(where(error)) from error
            self._mistake(request, Code.MODEL_ERROR, f"prepare: {where(error)}")

        groups = self._preparation.run(job, self._base, rows, failed)
        return [_Group(requests, [rows[index] for index in requests], inputs) for requests, inputs in groups]

    def _staged(self, job: Run, rows: list[int]) -> _Group:
        inputs: Inputs = {}
        for spec, place in zip(self._specs, job.inputs, strict=True):
            inputs[spec.name] = self._read(spec, place)
        return _Group(range(job.requests), rows, inputs)

    def _read(self, spec: TensorSpec, place: Placed) -> Any:
        offset = self._base + place.offset
        if spec.datatype == "BYTES":
            return split_elements(self._memory[offset : offset + place.size])
        staged = torch.frombuffer(self._memory, dtype=TORCH[spec.datatype], count=prod(place.dims), offset=offset)
        return staged.view(place.dims)

    def _execute(self, group: _Group) -> None:
        """Run a group; halve it where it fails."""
        waiting = [group]
        while waiting:
            current = waiting.pop()
            failure = self._attempt(current)
            if failure is None:
                continue
            code, message = failure
            if code is Code.RESOURCE_EXHAUSTED:
                self._device.recover()
            if code is Code.RESULT_TOO_LARGE and self._done.parts:
                self._done.left += current.requests  # the others took the room: these run again, without them
                continue
            count = len(current.requests)
            if count == 1:
                self._mistake(current.requests[0], code, message)
                continue
            waiting += [current.cut(count // 2, count), current.cut(0, count // 2)]

    def _attempt(self, group: _Group) -> tuple[Code, str] | None:
        """Run a group once; return why it failed. What it allocated is free again when this returns."""
        rows = sum(group.rows)
        try:
            outputs = self.forward(self._on_device(group.inputs), rows)
            finite = finite_rows(self._outputs, outputs, rows)
            if finite is None or len(group.requests) > 1:
                self._keep(group, outputs)
        except Exception as error:
            if is_sticky(error):
                raise DeviceLost(where(error)) from error
            code = Code.MODEL_ERROR
            if is_out_of_memory(error):
                code = Code.RESOURCE_EXHAUSTED
            elif isinstance(error, _Room):
                code = Code.RESULT_TOO_LARGE
            return code, str(error) if isinstance(error, ContractError | _Room) else where(error)
        if finite is None:
            return None
        if len(group.requests) == 1:
            return Code.NON_FINITE_OUTPUT, "an output has NaN or infinity"
        begin = 0
        for position, count in enumerate(group.rows):
            if not all(finite[begin : begin + count]):
                self._execute(group.cut(position, position + 1))
            begin += count
        return None

    def _on_device(self, inputs: Inputs) -> Inputs:
        """Copy staged inputs to the device, for every try afresh: the model may have written into the last copy."""
        began = time.perf_counter()
        copied = {
            name: self._device.to_device(value) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }
        self._done.stage_seconds += time.perf_counter() - began
        return copied

    def _keep(self, group: _Group, outputs: list[Any]) -> None:
        """Put the outputs of a group into the slot."""
        placed = [self._write(spec, value) for spec, value in zip(self._outputs, outputs, strict=True)]
        self._done.parts.append(Part(list(group.requests), placed))

    def _write(self, spec: TensorSpec, value: Any) -> Placed:
        start = -(-self._position // _ALIGNMENT) * _ALIGNMENT
        if spec.datatype == "BYTES":
            raw = join_elements(value)
            size, dims = len(raw), [len(value)]
        else:
            dims = list(value.shape)
            size = prod(dims) * DATATYPE_BYTES[spec.datatype]
        if start + size > self._start.slot_bytes:
            limit = self._start.slot_bytes - self._start.input_bytes
            raise _Room(f"the outputs of this batch are larger than a staging slot's {limit} bytes")
        at = self._base + start
        if spec.datatype == "BYTES":
            self._memory[at : at + size] = raw
        elif size:
            place = torch.frombuffer(self._memory, dtype=TORCH[spec.datatype], count=prod(dims), offset=at)
            self._device.to_host(value, place.view(dims))
        self._position = start + size
        return Placed(start, size, dims)

    def _mistake(self, request: int, code: Code, message: str) -> None:
        self._done.mistakes.append(Mistake(request, code.value, printable(message[:500])))


def _rows_of(value: Any, begin: int, end: int, rows: int) -> Any:
    """Cut rows out of an input; a BYTES list may have several elements per row."""
    width = len(value) // rows if isinstance(value, list) and rows else 1
    return value[begin * width : end * width]


def _joined(pieces: list[Any]) -> Any:
    return torch.cat(pieces) if isinstance(pieces[0], torch.Tensor) else [part for piece in pieces for part in piece]


def check_model_contract(error: Exception) -> ModelError:
    """Return what a failed warm-up means for the start."""
    return ModelError(
        f"the model failed its warm-up: {str(error) if isinstance(error, ContractError) else where(error)}"
    )
