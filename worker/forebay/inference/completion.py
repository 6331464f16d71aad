"""A model that runs in steps, run from `begin` to the end of its last row as `forward` would; what it returns, checked.

Runs in the replica's thread and imports torch. It is what the warm-up, the self-check, the canary and trials run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from forebay.inference.declared import ContractError, as_declared
from forebay.inference.model import Model, TensorSpec, runs_in_steps


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
        if isinstance(value, torch.Tensor):
            value = value[None].clone()  # the model may write on into it
        elif spec.datatype == "BYTES":
            value = [value]
        outputs.append(as_declared(spec, value, 1, "step()"))
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
