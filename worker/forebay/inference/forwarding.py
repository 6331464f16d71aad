"""One call of the model: what it is given, padded where only some shapes are allowed, and what it returned, checked.

Runs in the replica's thread, under inference mode, which is a matter of the thread that runs; imports torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from forebay.inference.compilation import compiled, least_rows
from forebay.inference.completion import whole_call
from forebay.inference.declared import ContractError, as_declared
from forebay.inference.devices.cpu import Device
from forebay.inference.groups import Inputs
from forebay.inference.messages import Start
from forebay.inference.model import Model, TensorSpec
from forebay.inference.precision import dtype_of


class Forward:
    """Calls the model with inputs that are on its device already."""

    def __init__(self, model: Model, start: Start, device: Device | None = None) -> None:
        self._model = model
        self._outputs = list(model.outputs)
        self._padded = [spec for spec in model.prepared or model.inputs if spec.pad is not None]
        self._dtype = dtype_of(start.precision)
        self._sizes = sorted(start.sizes)
        self._buckets = sorted(start.buckets)
        self._least = least_rows(start)
        self.compiled = compiled(model, start, device)
        self._call = self.compiled or whole_call(model, start.max_steps)

    def __call__(self, inputs: Inputs, rows: int) -> list[Any]:
        """Run `rows` rows and return the outputs in declared order."""
        if self._buckets:
            inputs = dict(inputs)  # the caller keeps its own alive: another stream may have brought them
            for spec in self._padded:
                inputs[spec.name] = up_to_bounds(inputs[spec.name], spec, self._buckets)
        wanted = self.size(rows)
        if wanted != rows:
            inputs = {name: _repeat_last(value, rows, wanted) for name, value in inputs.items()}
        if self._dtype is not None:
            inputs = {name: as_precision(value, self._dtype) for name, value in inputs.items()}
        with torch.inference_mode():
            returned = self._call(**inputs)
        outputs = self._checked(returned, wanted)
        return outputs if wanted == rows else [_first(value, rows, wanted) for value in outputs]

    def size(self, rows: int) -> int:
        """Return the size that `rows` rows run in: the next allowed one, where there is one."""
        at = bisect_left(self._sizes, rows)
        return max(self._sizes[at] if at < len(self._sizes) else rows, self._least)

    def limit(self, rows: int) -> int:
        """Return the most rows up to `rows` that run in an allowed size of no more; `rows` where none is so small."""
        at = bisect_left(self._sizes, rows + 1)
        return self._sizes[at - 1] if at else rows

    def _checked(self, returned: Any, rows: int) -> list[Any]:
        """Match what forward returned to the declared outputs; a positional guess is never made."""
        name = type(self._model).__name__
        if isinstance(returned, Mapping):
            named = returned
        elif len(self._outputs) == 1:
            named = {self._outputs[0].name: returned}
        else:
            raise ContractError(f"{name}.forward() must return a dict with {[spec.name for spec in self._outputs]}")
        found = []
        for spec in self._outputs:
            if spec.name not in named:
                raise ContractError(f"{name}.forward() returned no output {spec.name!r}")
            found.append(as_declared(spec, named[spec.name], rows))
        return found


def as_precision(value: Any, dtype: torch.dtype | None) -> Any:
    """Return an input in what the model computes in: fractions alone are cast."""
    if dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)


def _repeat_last(value: Any, rows: int, wanted: int) -> Any:
    """Fill up with copies of a real row: zeros could be what no model was made for."""
    if isinstance(value, list):
        return value + value[-(len(value) // rows) :] * (wanted - rows)
    return torch.cat([value, value[-1:].expand(wanted - rows, *value.shape[1:])])


def _first(value: Any, rows: int, wanted: int) -> Any:
    return value[: len(value) // wanted * rows]


def up_to_bounds(value: torch.Tensor, spec: TensorSpec, bounds: Sequence[int]) -> torch.Tensor:
    """Pad the dimensions that vary up to the next bound; what is longer than all of them stays as it is."""
    missing: list[int] = []
    for dim, declared in zip(reversed(value.shape[1:]), reversed(list(spec.shape)[1:]), strict=True):
        at = bisect_left(bounds, dim)
        missing += [0, bounds[at] - dim if declared == -1 and at < len(bounds) else 0]
    return functional.pad(value, missing, value=spec.pad) if any(missing) else value
