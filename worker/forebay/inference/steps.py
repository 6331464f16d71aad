"""Calling a model that runs in steps: `begin` for the rows that join, `step` for all that run, both checked.

Runs in the replica's thread and imports torch. Knows one call at a time: who runs together, and what becomes of a call
that fails, is `stepping`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from forebay.errors import ConfigError
from forebay.inference.declared import ContractError, as_declared, finite_rows
from forebay.inference.devices import Device
from forebay.inference.forwarding import as_precision, up_to_bounds
from forebay.inference.groups import Inputs
from forebay.inference.messages import Start
from forebay.inference.model import Model, TensorSpec, runs_in_steps
from forebay.inference.precision import dtype_of
from forebay.inference.samples import collated, ragged_specs


def check_settings(model: Model, start: Start) -> None:
    """Refuse settings that a model which runs in steps cannot follow. Raises ConfigError with the mend."""
    if not runs_in_steps(model):
        return
    name = type(model).__name__
    if start.compile != "none":
        raise ConfigError(
            f"inference.compile {start.compile} compiles forward(), and {name} runs in steps: set it to none, and "
            "compile what step() calls in load() where that pays"
        )
    if start.sizes:
        raise ConfigError(
            f"batch.allowed_batch_sizes is for models with forward(): {name} runs in steps, of as many rows as there "
            "are; remove it"
        )
    if start.max_cost is not None and start.continuous:
        raise ConfigError(
            f"batch.max_batch_cost bounds batches, and {name} runs in steps, which rows join one by one: remove it and "
            "bound batch.max_batch_size, or set batch.dispatch to static"
        )


class Steps:
    """The calls of one model. `most` is how many steps a row may take."""

    def __init__(self, model: Model, start: Start, device: Device) -> None:
        self._model = model
        self._name = type(model).__name__
        self._device = device
        self._dtype = dtype_of(start.precision)
        self._buckets = sorted(start.buckets)
        self._padded = ragged_specs(list(model.prepared or model.inputs))
        self.specs = list(model.prepared or model.inputs)
        self.outputs = list(model.outputs)
        self.most = start.max_steps
        self.continuous = start.continuous

    def shapes_of(self, row: Inputs) -> tuple[Any, ...]:
        """Return what rows have to have in common to begin in one call."""
        return tuple(
            None if spec.pad is not None or not isinstance(row[spec.name], torch.Tensor) else row[spec.name].shape[1:]
            for spec in self.specs
        )

    def begin(self, rows: Sequence[Inputs]) -> list[Any]:
        """Begin rows, each given as one; return their states."""
        inputs = collated(self.specs, rows)
        if self._buckets:
            for spec in self._padded:
                inputs[spec.name] = up_to_bounds(inputs[spec.name], spec, self._buckets)
        copied = self._device.upload(inputs)
        with self._device.computing(), torch.inference_mode():
            begin: Any = getattr(self._model, "begin")  # noqa: B009
            found = begin(**{name: as_precision(value, self._dtype) for name, value in copied.items()})
        self._device.download([], copied).wait()  # the device may still read the inputs
        return states(self._name, found, len(rows))

    def step(self, held: list[Any]) -> list[list[Any] | None]:
        """Run one step; return, for each row, its outputs in declared order where it has ended."""
        with self._device.computing(), torch.inference_mode():
            found = ended(self._model, held)
        return [None if one is None else one_row(self._name, self.outputs, one) for one in found]

    def join(self, rows: Sequence[list[Any]]) -> tuple[list[Any], bool]:
        """Return the outputs of a request's rows, and whether all are finite."""
        with self._device.computing(), torch.inference_mode():
            outputs = joined(self._name, self.outputs, rows)
            return outputs, finite_rows(self.outputs, outputs, len(rows)) is None


def states(name: str, found: Any, rows: int) -> list[Any]:
    """Check what `begin` returned."""
    if not isinstance(found, list | tuple) or len(found) != rows:
        got = f"{len(found)} states" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
        raise ContractError(f"{name}.begin() gave {got} for {rows} rows; return a list with one state per row")
    return list(found)


def ended(model: Model, held: list[Any]) -> list[Any]:
    """Run one step of a model; return what it says of each row."""
    step: Any = getattr(model, "step")  # noqa: B009
    found = step(held)
    if not isinstance(found, list | tuple) or len(found) != len(held):
        got = f"{len(found)} entries" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
        raise ContractError(
            f"{type(model).__name__}.step() gave {got} for {len(held)} rows; return a list with one entry per row: "
            "None while it goes on, else its outputs"
        )
    return list(found)


def one_row(name: str, specs: Sequence[TensorSpec], found: Any) -> list[Any]:
    """Check the outputs of a row that has ended, which have no row dimension; return them with one."""
    if not isinstance(found, Mapping):
        if len(specs) != 1:
            raise ContractError(f"{name}.step() must end a row with a dict of {[spec.name for spec in specs]}")
        found = {specs[0].name: found}
    outputs: list[Any] = []
    for spec in specs:
        if spec.name not in found:
            raise ContractError(f"{name}.step() ended a row without output {spec.name!r}")
        value = found[spec.name]
        with_rows = (
            value[None].clone() if isinstance(value, torch.Tensor) else [value]
        )  # the model may write on into it
        outputs.append(as_declared(spec, with_rows, 1, "step()"))
    return outputs


def joined(name: str, specs: Sequence[TensorSpec], rows: Sequence[list[Any]], *, pads: bool = False) -> list[Any]:
    """Join rows; those of different lengths are padded where their output declares `pad`, or `pads` says so."""
    outputs: list[Any] = []
    for spec, values in zip(specs, zip(*rows, strict=True), strict=True):
        if not isinstance(values[0], torch.Tensor):
            outputs.append([element for value in values for element in value])
            continue
        shapes = {tuple(value.shape[1:]) for value in values}
        if len(shapes) > 1:
            if spec.pad is None and not pads:
                raise ContractError(
                    f"{name}.step() ended the rows of one request with {spec.name} of different lengths: declare its "
                    "pad, or send one row per request"
                )
            longest = [max(dims) for dims in zip(*shapes, strict=True)]
            values = tuple(_filled(value, longest, spec.pad or 0) for value in values)
        outputs.append(values[0] if len(values) == 1 else torch.cat(values))
    return outputs


def _filled(value: torch.Tensor, dims: Sequence[int], pad: float) -> torch.Tensor:
    filled = torch.full([1, *dims], pad, dtype=value.dtype, device=value.device)
    filled[tuple(slice(0, dim) for dim in value.shape)] = value
    return filled


def whole_call(model: Model, most: int) -> Callable[..., Any]:
    """Return what runs a batch as `forward` would: a model's forward, or all of its steps until the last row ends."""
    if not runs_in_steps(model):
        return model.forward
    name, specs = type(model).__name__, list(model.outputs)

    def run(**inputs: Any) -> Any:
        begin: Any = getattr(model, "begin")  # noqa: B009
        found = begin(**inputs)
        held = states(name, found, len(found) if isinstance(found, list | tuple) else 0)
        rows: list[Any] = [None] * len(held)
        running, steps = list(range(len(held))), 0
        while running:
            if steps == most:
                raise ContractError(too_long(most))
            steps += 1
            for index, one in zip(running, ended(model, [held[index] for index in running]), strict=True):
                rows[index] = None if one is None else one_row(name, specs, one)
            running = [index for index in running if rows[index] is None]
        outputs = joined(name, specs, rows, pads=True)
        return {spec.name: value for spec, value in zip(specs, outputs, strict=True)}

    return run


def too_long(most: int) -> str:
    """Say that a row took too many steps."""
    return f"the row has not ended after inference.max_steps ({most}) steps"
