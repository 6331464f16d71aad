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
from forebay.inference.devices import Device, is_out_of_memory, is_sticky
from forebay.inference.loading import where
from forebay.inference.messages import Done, Mistake, Part, Placed, Run, Start
from forebay.inference.model import DATATYPE_BYTES, Model, TensorSpec
from forebay.inference.staging import join_elements, split_elements
from forebay.records import Code

TORCH = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "UINT16": torch.uint16,
    "INT16": torch.int16,
    "UINT32": torch.uint32,
    "INT32": torch.int32,
    "UINT64": torch.uint64,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
_ALIGNMENT = 64
_COMPUTED_AS = {"bf16": torch.bfloat16, "fp16": torch.float16}

Inputs = dict[str, Any]


class DeviceLost(Exception):
    """The device is lost to this process; the replica must exit and be replaced."""


class _Contract(Exception):
    """The model's output is not what it declared."""


class _Room(Exception):
    """The outputs do not fit into the slot."""


class _Group:
    """Requests that run together: their indices in the batch, their rows, and their inputs on the device."""

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
        self._fed = list(model.prepared or model.inputs)
        self._outputs = list(model.outputs)
        self._prepares = bool(model.prepared)
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
            raise _Contract(f"{name}.forward() must return a dict with {[spec.name for spec in self._outputs]}")
        found = []
        for spec in self._outputs:
            if spec.name not in named:
                raise _Contract(f"{name}.forward() returned no output {spec.name!r}")
            found.append(_as_declared(spec, named[spec.name], rows))
        return found

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
        return self._device.to_device(staged.view(place.dims))

    def _prepared(self, job: Run, rows: list[int]) -> list[_Group]:
        """Run `prepare` for each request, and collate what may share a batch. An error is that request's alone."""
        made: dict[Any, list[tuple[int, Inputs]]] = {}
        for index, inputs in enumerate(self._requests(job)):
            try:
                prepared = self._prepare(inputs, rows[index])
            except Exception as error:
                if is_sticky(error):
                    raise DeviceLost(where(error)) from error
                self._mistake(index, Code.MODEL_ERROR, f"prepare: {where(error)}")
                continue
            made.setdefault(_lane(self._fed, prepared), []).append((index, prepared))
        groups = []
        for members in made.values():
            inputs = {
                spec.name: self._collated(spec, [prepared[spec.name] for _, prepared in members]) for spec in self._fed
            }
            groups.append(_Group([index for index, _ in members], [rows[index] for index, _ in members], inputs))
        return groups

    def _requests(self, job: Run) -> list[Inputs]:
        """Take a batch apart into the inputs of each request, on the CPU."""
        requests: list[Inputs] = [{} for _ in range(job.requests)]
        for index, (spec, place) in enumerate(zip(self._specs, job.inputs, strict=True)):
            offset = self._base + place.offset
            elements = split_elements(self._memory[offset : offset + place.size]) if spec.datatype == "BYTES" else []
            taken = 0
            for inputs, shapes in zip(requests, job.shapes, strict=True):
                dims = shapes[index]
                count = prod(dims)
                if spec.datatype == "BYTES":
                    inputs[spec.name] = elements[taken : taken + count]
                else:
                    at = offset + taken * DATATYPE_BYTES[spec.datatype]
                    dtype = TORCH[spec.datatype]
                    inputs[spec.name] = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=at).view(dims)
                taken += count
        return requests

    def _prepare(self, inputs: Inputs, rows: int) -> Inputs:
        prepare: Any = getattr(self._model, "prepare")  # noqa: B009
        returned = prepare(**inputs)
        if not isinstance(returned, Mapping):
            if len(self._fed) != 1:
                raise ValueError(f"prepare() must return a dict with {[spec.name for spec in self._fed]}")
            returned = {self._fed[0].name: returned}
        prepared: Inputs = {}
        for spec in self._fed:
            if spec.name not in returned:
                raise ValueError(f"prepare() returned no {spec.name!r}")
            value = returned[spec.name]
            if spec.datatype != "BYTES":
                value = torch.as_tensor(value)
                _check_shape("prepare()", spec, tuple(value.shape), rows)
                value = value.to(TORCH[spec.datatype])
            prepared[spec.name] = value
        return prepared

    def _collated(self, spec: TensorSpec, values: list[Any]) -> Any:
        if spec.datatype == "BYTES":
            return [element for value in values for element in value]
        if len({tuple(value.shape[1:]) for value in values}) == 1:
            return self._device.to_device(values[0] if len(values) == 1 else torch.cat(values))
        dims = [max(sizes) for sizes in zip(*[value.shape[1:] for value in values], strict=True)]
        joined = torch.full((sum(len(value) for value in values), *dims), spec.pad or 0, dtype=TORCH[spec.datatype])
        row = 0
        for value in values:
            joined[(slice(row, row + len(value)), *[slice(0, dim) for dim in value.shape[1:]])] = value
            row += len(value)
        return self._device.to_device(joined)

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
            count = len(current.requests)
            if count == 1:
                self._mistake(current.requests[0], code, message)
                continue
            waiting += [current.cut(count // 2, count), current.cut(0, count // 2)]

    def _attempt(self, group: _Group) -> tuple[Code, str] | None:
        """Run a group once; return why it failed. What it allocated is free again when this returns."""
        rows = sum(group.rows)
        try:
            outputs = self.forward(group.inputs, rows)
            finite = _finite_rows(self._outputs, outputs, rows)
            if finite is None:
                self._keep(group, outputs)
                return None
        except Exception as error:
            if is_sticky(error):
                raise DeviceLost(where(error)) from error
            code = Code.MODEL_ERROR
            if is_out_of_memory(error):
                code = Code.RESOURCE_EXHAUSTED
            elif isinstance(error, _Room):
                code = Code.RESULT_TOO_LARGE
            return code, str(error) if isinstance(error, _Contract | _Room) else where(error)
        if len(group.requests) == 1:
            return Code.NON_FINITE_OUTPUT, "an output has NaN or infinity"
        self._keep(group, outputs)
        begin = 0
        for position, count in enumerate(group.rows):
            if not all(finite[begin : begin + count]):
                self._execute(group.cut(position, position + 1))
            begin += count
        return None

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
        self._done.mistakes.append(Mistake(request, code.value, message[:500]))


def _rows_of(value: Any, begin: int, end: int, rows: int) -> Any:
    """Cut rows out of an input; a BYTES list may have several elements per row."""
    width = len(value) // rows if isinstance(value, list) and rows else 1
    return value[begin * width : end * width]


def _joined(pieces: list[Any]) -> Any:
    return torch.cat(pieces) if isinstance(pieces[0], torch.Tensor) else [part for piece in pieces for part in piece]


def _lane(specs: Sequence[TensorSpec], prepared: Inputs) -> Any:
    """Prepared requests share a batch where their shapes agree in every dimension that may not be padded."""
    return tuple(
        None if spec.datatype == "BYTES" or spec.pad is not None else tuple(prepared[spec.name].shape[1:])
        for spec in specs
    )


def _check_shape(who: str, spec: TensorSpec, shape: tuple[int, ...], rows: int) -> None:
    fits = len(shape) == len(spec.shape) and all(
        want in (-1, dim) for want, dim in zip(spec.shape[1:], shape[1:], strict=True)
    )
    if not fits:
        raise _Contract(f"{who} gave {spec.name} the shape {list(shape)}, declared is {list(spec.shape)}")
    if shape[0] != rows:
        raise _Contract(f"{who} gave {spec.name} {shape[0]} rows for {rows} rows")


def _as_declared(spec: TensorSpec, value: Any, rows: int) -> Any:
    """Check one output against its declaration; floating types are converted, others must match."""
    if spec.datatype == "BYTES":
        if isinstance(value, torch.Tensor) or len(value) != rows:
            size = "a tensor" if isinstance(value, torch.Tensor) else f"{len(value)} elements"
            raise _Contract(f"forward() gave {spec.name} {size} for {rows} rows; BYTES is a list, one element per row")
        return [element.encode() if isinstance(element, str) else bytes(element) for element in value]
    if not isinstance(value, torch.Tensor):
        raise _Contract(f"forward() gave {spec.name} a {type(value).__name__}, not a tensor")
    _check_shape("forward()", spec, tuple(value.shape), rows)
    wanted = TORCH[spec.datatype]
    if value.dtype != wanted and value.dtype.is_floating_point != wanted.is_floating_point:
        raise _Contract(f"forward() gave {spec.name} as {value.dtype}, declared is {spec.datatype}")
    return value.detach()


def _finite_rows(specs: Sequence[TensorSpec], outputs: list[Any], rows: int) -> list[bool] | None:
    """Say which rows are finite in every floating output; None if all are. A finite sum proves it for all at once."""
    suspect = [
        value
        for spec, value in zip(specs, outputs, strict=True)
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and not bool(torch.isfinite(value.sum(dtype=torch.float64)))
    ]
    if not suspect:
        return None
    finite = torch.ones(rows, dtype=torch.bool, device=suspect[0].device)
    for value in suspect:
        finite &= torch.isfinite(value).reshape(rows, -1).all(1)
    listed: list[bool] = finite.tolist()
    return None if all(listed) else listed


def check_model_contract(error: Exception) -> ModelError:
    """Return what a failed warm-up means for the start."""
    return ModelError(f"the model failed its warm-up: {str(error) if isinstance(error, _Contract) else where(error)}")
