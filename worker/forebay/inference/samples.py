"""Rows to try a model with: its own example, or harmless numbers; distinct ones for the self-check. Imports torch.

Runs in the replica before it is ready. Integers may index a table, each column another one, and one too large takes a
CUDA device down: without an example they are zeros and ones, with one they stay in their columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forebay.errors import ModelError
from forebay.inference.declared import TORCH, without_loss
from forebay.inference.groups import Inputs, rows_of
from forebay.inference.loading import where
from forebay.inference.model import Model, TensorSpec

_VARIABLE = 16
"""Length of a dimension that varies, where no example says one."""

_FRACTIONS = ("FP16", "BF16", "FP32", "FP64")


def example_rows(model: Model, given: Mapping[str, Any] | None = None) -> tuple[Inputs, int] | None:
    """Return what forward takes for the rows of the model's `example()`, and their number; None where it gives none.

    `given` is what `example()` has returned before, so that it is not asked again.

    Raises ModelError where the example or its preparation fails.
    """
    specs = list(model.prepared or model.inputs)
    try:
        given = model.example() if given is None else given
        if given is None:
            return None
        if model.prepared:
            inputs = {spec.name: given_input(spec, given) for spec in model.inputs}
            returned = getattr(model, "prepare")(**inputs)  # noqa: B009
            given = returned if isinstance(returned, Mapping) else {specs[0].name: returned}
        found = {spec.name: given_input(spec, given) for spec in specs}
        rows = min(len(value) for value in found.values())
        if not rows:
            raise ValueError("it has no row")
        return found, rows
    except Exception as error:
        raise ModelError(f"{type(model).__name__}.example() failed: {where(error)}") from error


def first_row(model: Model, given: Mapping[str, Any] | None = None) -> Inputs:
    """Return one row of every tensor that forward takes: of the example, else zeros."""
    found = example_rows(model, given)
    if found is None:
        return {spec.name: zeros(spec) for spec in model.prepared or model.inputs}
    return one_row(*found, 0)


def one_row(inputs: Inputs, rows: int, index: int) -> Inputs:
    """Return one of several rows."""
    return {name: rows_of(value, index, index + 1, rows) for name, value in inputs.items()}


def given_input(spec: TensorSpec, given: Mapping[str, Any]) -> Any:
    """Return one input of what `example()` gave, as the model would get it."""
    if spec.name not in given:
        raise ValueError(f"it has no {spec.name!r}")
    value = given[spec.name]
    if spec.datatype == "BYTES":
        return [value] if isinstance(value, bytes) else list(value)
    return without_loss("it", spec, torch.as_tensor(value))


def repeated(row: Inputs, rows: int) -> Inputs:
    """Return a batch of copies of one row."""
    return {
        name: value * rows if isinstance(value, list) else value.repeat(rows, *[1] * (value.dim() - 1))
        for name, value in row.items()
    }


def size_of(inputs: Inputs) -> int:
    """Return the bytes of a batch."""
    return sum(
        value.nbytes if isinstance(value, torch.Tensor) else sum(len(part) + 4 for part in value)
        for value in inputs.values()
    )


def cost_of(inputs: Inputs, rows: int, unit: str) -> int:
    """Return what a batch weighs against `batch.max_batch_cost`."""
    if unit == "elements":
        return sum(value.numel() if isinstance(value, torch.Tensor) else len(value) for value in inputs.values())
    return rows if unit == "rows" else size_of(inputs)


def ragged_specs(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return the tensors that may be padded."""
    return [spec for spec in specs if spec.pad is not None]


def with_lengths(specs: Sequence[TensorSpec], row: Inputs, length: int) -> Inputs:
    """Return a row whose ragged dimensions have `length`: cut, or continued with what it has from its start."""
    changed = dict(row)
    for spec in ragged_specs(specs):
        value = row[spec.name]
        for axis, dim in enumerate(spec.shape):
            if axis and dim == -1 and value.shape[axis]:
                value = value.index_select(axis, torch.arange(length) % value.shape[axis])
        changed[spec.name] = value
    return changed


def halved(specs: Sequence[TensorSpec], row: Inputs) -> Inputs:
    """Return the first half of a row's ragged dimensions."""
    changed = dict(row)
    for spec in ragged_specs(specs):
        for axis, dim in enumerate(spec.shape):
            if axis and dim == -1:
                changed[spec.name] = changed[spec.name].narrow(axis, 0, (row[spec.name].shape[axis] + 1) // 2)
    return changed


def padded_to(specs: Sequence[TensorSpec], row: Inputs, longest: Mapping[str, Sequence[int]]) -> Inputs:
    """Return a row whose ragged tensors are filled up with their pad value to the dimensions in `longest`."""
    changed = dict(row)
    for spec in ragged_specs(specs):
        value = row[spec.name]
        dims = [len(value), *longest[spec.name]]
        filled = torch.full(dims, spec.pad or 0, dtype=value.dtype)
        filled[tuple(slice(0, dim) for dim in value.shape)] = value
        changed[spec.name] = filled
    return changed


def collated(specs: Sequence[TensorSpec], rows: Sequence[Inputs]) -> Inputs:
    """Return rows as one batch, ragged ones padded to the longest."""
    longest = {
        spec.name: [max(dims) for dims in zip(*[row[spec.name].shape[1:] for row in rows], strict=True)]
        for spec in ragged_specs(specs)
    }
    padded = [padded_to(specs, row, longest) for row in rows]
    return {
        spec.name: [element for row in padded for element in row[spec.name]]
        if spec.datatype == "BYTES"
        else torch.cat([row[spec.name] for row in padded])
        for spec in specs
    }


def distinct_rows(model: Model, count: int) -> list[Inputs]:
    """Return rows that differ as far as that is safe: in their numbers, and in their lengths where they may."""
    specs = list(model.prepared or model.inputs)
    dice = torch.Generator().manual_seed(0)
    found = example_rows(model)
    if found is None:
        rows = [{spec.name: _harmless(spec, dice) for spec in specs} for _ in range(count)]
    else:
        inputs, given = found
        rows = [one_row(inputs, given, index % given) for index in range(count)]
        rows[given:] = [{spec.name: _varied(spec, row[spec.name], dice) for spec in specs} for row in rows[given:]]
    return [_shortened(specs, row, index, count) for index, row in enumerate(rows)]


def invented_row(specs: Sequence[TensorSpec], *, whole: bool) -> Inputs:
    """Return one row of random fractions, the same in every process; whole numbers are 0 or 1 where `whole` allows."""
    dice = torch.Generator().manual_seed(1)
    return {spec.name: _harmless(spec, dice) if whole or spec.datatype in _FRACTIONS else zeros(spec) for spec in specs}


def _varied(spec: TensorSpec, value: Any, dice: torch.Generator) -> Any:
    """Return a row that differs: ragged ones in another order, else zeros between; smaller fractions; text as it is."""
    if isinstance(value, list):
        return value
    ragged = [axis for axis, dim in enumerate(spec.shape) if axis and dim == -1] if spec.pad is not None else []
    for axis in ragged:
        value = value.index_select(axis, torch.randperm(value.shape[axis], generator=dice))
    if value.is_floating_point():
        return value * (0.5 + 0.5 * torch.rand(value.shape, generator=dice)).to(value.dtype)
    return value if ragged else value * torch.randint(0, 2, value.shape, generator=dice).to(value.dtype)


def _shortened(specs: Sequence[TensorSpec], row: Inputs, index: int, count: int) -> Inputs:
    """Cut a row's ragged tensors: the first stays whole, the last keeps more than half."""
    lengths = {
        row[spec.name].shape[axis]
        for spec in ragged_specs(specs)
        for axis, dim in enumerate(spec.shape)
        if axis and dim == -1
    }
    if len(lengths) != 1:
        return row
    (length,) = lengths
    return with_lengths(specs, row, max(length - length * index // (2 * count), 1))


def _dims(spec: TensorSpec) -> list[int]:
    return [_VARIABLE if dim == -1 else dim for dim in list(spec.shape)[1:]]


def zeros(spec: TensorSpec) -> Any:
    """Return a row of zeros or of empty texts; of ones where zero is padding: a row of padding alone is no request."""
    dims = _dims(spec)
    if spec.datatype == "BYTES":
        count = 1
        for dim in dims:
            count *= dim
        return [b""] * count
    return torch.full([1, *dims], 1 if spec.pad == 0 else 0, dtype=TORCH[spec.datatype])


def _harmless(spec: TensorSpec, dice: torch.Generator) -> Any:
    if spec.datatype == "BYTES":
        return zeros(spec)
    dims, dtype = [1, *_dims(spec)], TORCH[spec.datatype]
    if dtype.is_floating_point:
        return torch.rand(dims, generator=dice).to(dtype)
    if spec.pad is not None:  # what is padding must differ from what is not
        return torch.full(dims, 1 if spec.pad != 1 else 0).to(dtype)
    return torch.randint(0, 2, dims, generator=dice).to(dtype)
