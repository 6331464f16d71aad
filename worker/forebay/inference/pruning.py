"""Pruning as preparation: zeros in place of a model's smallest weights, for `forebay optimize` to measure and to write.

Never part of serving. Zeros alone make nothing faster: dense kernels multiply by them all the same. Only the 2:4
pattern does, compressed, in 16 bits, on a CUDA device of compute capability 8.0 or later. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from forebay.errors import ModelError

MAGNITUDE, TWO_FOUR = "magnitude", "2:4"
RECIPES = (MAGNITUDE, TWO_FOUR)
_GROUP, _KEPT = 4, 2
_COMPRESSIBLE = (torch.float16, torch.bfloat16)


def prune(tops: Iterable[nn.Module], recipe: str, share: float, who: str) -> int:
    """Put zeros in place of weights and return how many. `share` is that of the magnitude recipe, layer by layer.

    Raises ModelError for a model that has no layer to prune.
    """
    layers = [part for top in tops for part in top.modules() if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d)]
    found = 0
    for layer in layers:
        weight = layer.weight
        if recipe == MAGNITUDE:
            mask = _largest(weight, share)
        elif isinstance(layer, nn.Linear) and weight.shape[1] % _GROUP == 0:
            mask = _two_of_four(weight)
        else:
            continue
        with torch.no_grad():
            weight.mul_(mask)
        found += int((~mask).sum())
    if not found:
        wanted = (
            "linear layers whose inputs are a multiple of 4" if recipe == TWO_FOUR else "linear or convolution layers"
        )
        raise ModelError(f"{recipe} pruning takes {wanted}, and {who} has none that can be seen")
    return found


def compress(tops: Iterable[nn.Module]) -> int:
    """Store the 2:4 weights so that the device skips their zeros; return how many layers that is, 0 on a CPU."""
    done = 0
    for top in tops:
        for part in top.modules():
            if isinstance(part, nn.Linear) and part.weight.is_cuda and part.weight.dtype in _COMPRESSIBLE:
                try:
                    packed = torch.sparse.to_sparse_semi_structured(part.weight.detach())
                except (RuntimeError, ValueError, NotImplementedError):  # a shape that the kernels do not take
                    continue
                part.weight = nn.Parameter(packed, requires_grad=False)
                done += 1
    return done


def _largest(weight: torch.Tensor, share: float) -> torch.Tensor:
    """Mark what is kept: all but the smallest `share` of a layer's weights."""
    gone = int(weight.numel() * share)
    mask = torch.ones(weight.numel(), dtype=torch.bool, device=weight.device)
    mask[weight.detach().abs().flatten().argsort()[:gone]] = False
    return mask.reshape(weight.shape)


def _two_of_four(weight: torch.Tensor) -> torch.Tensor:
    """Mark the two largest of each four neighbours in a row."""
    groups = weight.detach().abs().reshape(-1, _GROUP)
    mask = torch.zeros_like(groups, dtype=torch.bool)
    return mask.scatter(1, groups.topk(_KEPT, dim=1).indices, True).reshape(weight.shape)
