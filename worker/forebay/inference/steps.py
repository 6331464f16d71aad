"""Calling a model that runs in steps: `begin` for the rows that join, `step` for all that run, both checked.

Runs in the replica's thread and imports torch. Knows one call at a time: who runs together, and what becomes of a call
that fails, is `stepping`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forebay.errors import ConfigError
from forebay.inference.completion import ended, joined, one_row, states
from forebay.inference.declared import finite_rows
from forebay.inference.devices import Device
from forebay.inference.forwarding import as_precision, up_to_bounds
from forebay.inference.groups import Inputs
from forebay.inference.messages import Start
from forebay.inference.model import Model, runs_in_steps
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
