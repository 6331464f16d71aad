"""When two runs of the same rows agree: their largest difference, and what is tolerated. Imports torch.

Runs in the replica, for the self-check. A label is no number: near a tie the last bit decides it, so what a flipped one
says about a model takes more than one row to tell; see `selfcheck`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forebay.inference.loading import modules
from forebay.inference.model import Model, TensorSpec
from forebay.inference.precision import QUANTISED, REDUCED

_LEAST_SCALE = 1e-2
_QUANTISED_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


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
    if is_quantised(model):
        return QUANTISED["int8"]
    reduced = (torch.float16, torch.bfloat16)
    for top in modules(model):
        if any(value.dtype in reduced for value in (*top.parameters(), *top.buffers())):
            return REDUCED
    narrow = any(spec.datatype in ("FP16", "BF16") for spec in (*model.inputs, *model.outputs))
    return REDUCED if narrow else 0.0


def is_quantised(model: Model) -> bool:
    """Whether a model computes in whole numbers in places: what its layers hold, or what its file's operations are.

    Layers that quantise their input on the fly may take the scale from the whole batch, as `quantize_dynamic` does.
    """
    if getattr(model, "is_quantised", False):
        return True
    for top in modules(model):
        if any(type(part).__module__.startswith(_QUANTISED_MODULES) for part in top.modules()):
            return True
        for value in (*top.parameters(), *top.buffers()):
            if type(value).__module__.startswith("torchao") or value.is_quantized:
                return True
    return False
