"""Whether a model keeps state between its calls: then several threads cannot share it. Imports torch."""

from __future__ import annotations

from typing import Any

import torch

from forebay.inference.loading import modules
from forebay.inference.model import Model


def state_of(model: Model) -> dict[str, Any]:
    """Return marks of the tensors and numbers that a model and its modules hold: a mark changes with what it marks."""
    holders: list[tuple[str, Any]] = [("", model)]
    for top in modules(model):
        holders += list(top.named_modules())
    found: dict[str, Any] = {}
    for name, holder in holders:
        held = {**vars(holder), **vars(holder).get("_buffers", {})}
        for attribute, value in held.items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{attribute}".lstrip(".")] = (id(value), _version(value))
            elif isinstance(value, int | float):
                found[f"{name}.{attribute}".lstrip(".")] = value
    return found


def _version(value: torch.Tensor) -> float:
    return float(value.double().sum()) if value.is_inference() else value._version


def changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return the name of something that is not as it was, None where nothing changed."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return names[0] if names else None
