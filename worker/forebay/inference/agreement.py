"""When two runs of the same rows agree: their largest difference, and what is tolerated. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forebay.inference.loading import modules
from forebay.inference.model import Model, TensorSpec

_REDUCED = 1e-2
_LEAST_SCALE = 1e-2


def difference(specs: Sequence[TensorSpec], one: Sequence[Any], other: Sequence[Any], tolerance: float) -> float:
    """Return the largest relative difference of two runs; a class that flips counts only where no number agrees."""
    floats, others = [0.0], [0.0]
    for spec, left, right in zip(specs, one, other, strict=True):
        if isinstance(left, torch.Tensor) and left.is_floating_point():
            floats.append(_relative(left, right))
        elif isinstance(left, torch.Tensor):
            others.append(_apart(spec, left, right))
        else:
            others.append(float(left != right))
    if max(others) <= tolerance or (len(floats) > 1 and max(floats) <= tolerance):
        return max(floats)
    return max(*floats, *others)


def _window(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what two outputs have in common: padding may have made one longer."""
    window = tuple(slice(0, min(pair)) for pair in zip(left.shape, right.shape, strict=True))
    return left[window].double(), right[window].double()


def _relative(left: torch.Tensor, right: torch.Tensor) -> float:
    left, right = _window(left, right)
    if not left.numel():
        return 0.0
    if not torch.equal(torch.isfinite(left), torch.isfinite(right)):
        return float("inf")
    left, right = torch.nan_to_num(left, 0.0, 0.0, 0.0), torch.nan_to_num(right, 0.0, 0.0, 0.0)
    scale = max(float(left.abs().max()), float(right.abs().max()), _LEAST_SCALE)
    return float((left - right).abs().max()) / scale


def _apart(spec: TensorSpec, left: torch.Tensor, right: torch.Tensor) -> float:
    """Compare whole numbers: bytes may be rounded fractions, so a step of one is none."""
    left, right = _window(left, right)
    if not left.numel():
        return 0.0
    steps = float((left - right).abs().max())
    return 0.0 if spec.datatype in ("UINT8", "INT8") and steps <= 1 else min(steps, 1.0)


def tolerance_of(model: Model) -> float:
    """Return what a model that computes in less than fp32 by itself is allowed."""
    reduced = (torch.float16, torch.bfloat16)
    for top in modules(model):
        for value in (*top.parameters(), *top.buffers()):
            if value.dtype in reduced or type(value).__module__.startswith("torchao") or value.is_quantized:
                return _REDUCED
    narrow = any(spec.datatype in ("FP16", "BF16") for spec in (*model.inputs, *model.outputs))
    return _REDUCED if narrow else 0.0
