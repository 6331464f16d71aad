"""Warm-up: every batch size class runs before the worker joins its group. A failure stops the start. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from forebay.errors import ModelError
from forebay.inference.declared import TORCH
from forebay.inference.devices import Device
from forebay.inference.loading import verify_eval, where
from forebay.inference.model import Model, TensorSpec
from forebay.inference.runner import Runner, check_model_contract

_VARIABLE = 16
_RUNS = 3


def sizes(largest: int) -> list[int]:
    """Return the powers of two up to `largest`, and `largest`."""
    found = [1]
    while found[-1] * 2 < largest:
        found.append(found[-1] * 2)
    return found if largest == 1 else [*found, largest]


def warm_up(runner: Runner, model: Model, device: Device, largest: int) -> list[tuple[int, float]]:
    """Run each size class three times; return (rows, best seconds) of each.

    The rows come from the model's `example()`, else they are zeros. Raises ModelError where the model fails.
    """
    row = _example(model)
    curve: list[tuple[int, float]] = []
    for rows in sizes(largest):
        inputs = {name: _repeated(value, rows, device) for name, value in row.items()}
        best = float("inf")
        for _ in range(_RUNS):
            began = time.perf_counter()
            try:
                outputs = runner.forward(inputs, rows)
            except Exception as error:
                raise check_model_contract(error) from error
            for output in outputs:
                if isinstance(output, torch.Tensor):
                    output.cpu()
            best = min(best, time.perf_counter() - began)
        curve.append((rows, best))
    verify_eval(model)
    return curve


def _example(model: Model) -> dict[str, Any]:
    """Return one row of every tensor that forward takes."""
    specs = list(model.prepared or model.inputs)
    try:
        given = model.example()
        if given is not None and model.prepared:
            inputs = {spec.name: _given(spec, given) for spec in model.inputs}
            returned = getattr(model, "prepare")(**inputs)  # noqa: B009
            given = returned if isinstance(returned, Mapping) else {specs[0].name: returned}
        if given is not None:
            return {spec.name: _one_row(_given(spec, given)) for spec in specs}
    except Exception as error:
        raise ModelError(f"{type(model).__name__}.example() failed: {where(error)}") from error
    return {spec.name: _zeros(spec) for spec in specs}


def _given(spec: TensorSpec, given: Mapping[str, Any]) -> Any:
    if spec.name not in given:
        raise ValueError(f"it has no {spec.name!r}")
    value = given[spec.name]
    if spec.datatype == "BYTES":
        return [value] if isinstance(value, bytes) else list(value)
    return torch.as_tensor(value).to(TORCH[spec.datatype])


def _one_row(value: Any) -> Any:
    return value[:1]


def _zeros(spec: TensorSpec) -> Any:
    dims = [_VARIABLE if dim == -1 else dim for dim in spec.shape[1:]]
    if spec.datatype == "BYTES":
        count = 1
        for dim in dims:
            count *= dim
        return [b""] * count
    return torch.zeros([1, *dims], dtype=TORCH[spec.datatype])


def _repeated(value: Any, rows: int, device: Device) -> Any:
    if isinstance(value, list):
        return value * rows
    return device.to_device(value.repeat(rows, *[1] * (value.dim() - 1)))
