"""What a model returns, checked against what it declared; a positional guess is never made. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forebay.inference.model import TensorSpec

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


class ContractError(Exception):
    """The model's output is not what it declared."""


def check_shape(who: str, spec: TensorSpec, shape: tuple[int, ...], rows: int) -> None:
    fits = len(shape) == len(spec.shape) and all(
        want in (-1, dim) for want, dim in zip(spec.shape[1:], shape[1:], strict=True)
    )
    if not fits:
        raise ContractError(f"{who} gave {spec.name} the shape {list(shape)}, declared is {list(spec.shape)}")
    if shape[0] != rows:
        raise ContractError(f"{who} gave {spec.name} {shape[0]} rows for {rows} rows")


def check_elements(who: str, spec: TensorSpec, value: Any, rows: int) -> None:
    """Check that a BYTES tensor is a list with one element per row."""
    if not isinstance(value, list | tuple):
        raise ContractError(f"{who} gave {spec.name} a {type(value).__name__}; BYTES is a list, one element per row")
    if len(value) != rows:
        raise ContractError(
            f"{who} gave {spec.name} {len(value)} elements for {rows} rows; BYTES is a list, one element per row"
        )


def without_loss(who: str, spec: TensorSpec, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as its declared type; no number is rounded to a whole one, or wraps around, to fit into it."""
    wanted = TORCH[spec.datatype]
    if value.dtype == wanted:
        return value
    cast = value.to(wanted)
    if not wanted.is_floating_point and not bool((cast.to(value.dtype) == value).all()):
        raise ContractError(
            f"{who} gave {spec.name} as {value.dtype} with numbers that the declared {spec.datatype} cannot hold; "
            "return whole numbers in its range, or declare another datatype"
        )
    return cast


def as_declared(spec: TensorSpec, value: Any, rows: int, who: str = "forward()") -> Any:
    """Check one output against its declaration; floating types are converted, others must match."""
    if spec.datatype == "BYTES":
        check_elements(who, spec, value, rows)
        return [element.encode() if isinstance(element, str) else bytes(element) for element in value]
    if not isinstance(value, torch.Tensor):
        raise ContractError(f"{who} gave {spec.name} a {type(value).__name__}, not a tensor")
    check_shape(who, spec, tuple(value.shape), rows)
    wanted = TORCH[spec.datatype]
    if value.dtype == wanted:
        return value.detach()
    if not (value.dtype.is_floating_point and wanted.is_floating_point):
        raise ContractError(
            f"{who} gave {spec.name} as {value.dtype}, declared is {spec.datatype}; convert it with .to({wanted})"
        )
    return value.detach().to(wanted)  # before the look for infinity: a narrower type may not hold the number


def finite_rows(specs: Sequence[TensorSpec], outputs: list[Any], rows: int) -> list[bool] | None:
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


def finite_flags(specs: Sequence[TensorSpec], outputs: list[Any], rows: int) -> torch.Tensor | None:
    """Say the same as a tensor on the outputs' device, without waiting for it; None where nothing can be infinite."""
    floats = [value for value in outputs if isinstance(value, torch.Tensor) and value.is_floating_point()]
    if not floats:
        return None
    flags = [torch.isfinite(value).flatten(1).all(1) if value.dim() > 1 else torch.isfinite(value) for value in floats]
    return flags[0] if len(flags) == 1 else torch.stack(flags).all(0)
