"""Preparation: each request through the model's own `prepare`; in a replica then collated, padded where allowed.

Runs in the replica, or in a preparer before batching, and imports torch. What `prepare` raises is one request's error;
the others go on.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, prod
from typing import Any

import torch

from forebay.inference.declared import TORCH, ContractError, check_elements, check_shape, without_loss
from forebay.inference.messages import Run
from forebay.inference.model import DATATYPE_BYTES, Model, TensorSpec
from forebay.inference.staging import split_elements

Inputs = dict[str, Any]

COST = "cost"
"""The key under which `prepare` may say, beside its tensors, what a request weighs against `batch.max_batch_cost`."""


class Preparation:
    """Prepares the requests of one replica or preparer."""

    def __init__(self, model: Model, memory: mmap.mmap) -> None:
        self._model = model
        self._memory = memory
        self._specs = list(model.inputs)
        self._fed = list(model.prepared)

    def run(
        self, job: Run, base: int, rows: list[int], failed: Callable[[int, Exception], None]
    ) -> list[tuple[list[int], Inputs]]:
        """Prepare every request of the batch whose slot starts at `base`.

        Returns the requests that may share a batch, by index, with their inputs on the CPU. `failed` is told the
        index and the error of a request that `prepare` refused.
        """
        made: dict[Any, list[tuple[int, Inputs]]] = {}
        for index, inputs in enumerate(self.requests(job, base)):
            try:
                prepared, _ = self.prepare(inputs, rows[index])  # a cost comes too late: the batch is cut already
            except Exception as error:
                failed(index, error)
                continue
            made.setdefault(_lane(self._fed, prepared), []).append((index, prepared))
        groups: list[tuple[list[int], Inputs]] = []
        for members in made.values():
            inputs = {
                spec.name: self._collated(spec, [prepared[spec.name] for _, prepared in members]) for spec in self._fed
            }
            groups.append(([index for index, _ in members], inputs))
        return groups

    def requests(self, job: Run, base: int) -> list[Inputs]:
        """Take a batch apart into the inputs of each request, on the CPU."""
        requests: list[Inputs] = [{} for _ in range(job.requests)]
        for index, (spec, place) in enumerate(zip(self._specs, job.inputs, strict=True)):
            offset = base + place.offset
            elements = split_elements(self._memory[offset : offset + place.size]) if spec.datatype == "BYTES" else []
            taken = 0
            for inputs, shapes in zip(requests, job.shapes, strict=True):
                dims = shapes[index]
                count = prod(dims)
                if spec.datatype == "BYTES":
                    inputs[spec.name] = elements[taken : taken + count]
                else:
                    at = offset + taken * DATATYPE_BYTES[spec.datatype]
                    dtype = TORCH[spec.datatype]
                    inputs[spec.name] = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=at).view(dims)
                taken += count
        return requests

    def prepare(self, inputs: Inputs, rows: int) -> tuple[Inputs, float | None]:
        """Prepare one request of `rows` rows; returns what `prepared` declares, checked, and the cost that it said."""
        prepare: Any = getattr(self._model, "prepare")  # noqa: B009
        returned = prepare(**inputs)
        if not isinstance(returned, Mapping):
            if len(self._fed) != 1:
                raise ValueError(f"prepare() must return a dict with {[spec.name for spec in self._fed]}")
            returned = {self._fed[0].name: returned}
        prepared: Inputs = {}
        for spec in self._fed:
            if spec.name not in returned:
                raise ValueError(f"prepare() returned no {spec.name!r}")
            value = returned[spec.name]
            if spec.datatype == "BYTES":
                check_elements("prepare()", spec, value, rows)
            else:
                value = torch.as_tensor(value)
                check_shape("prepare()", spec, tuple(value.shape), rows)
                value = without_loss("prepare()", spec, value)
            prepared[spec.name] = value
        return prepared, None if COST in prepared else _cost(returned.get(COST))

    def _collated(self, spec: TensorSpec, values: list[Any]) -> Any:
        if spec.datatype == "BYTES":
            return [element for value in values for element in value]
        if len({tuple(value.shape[1:]) for value in values}) == 1:
            return values[0] if len(values) == 1 else torch.cat(values)
        dims = [max(sizes) for sizes in zip(*[value.shape[1:] for value in values], strict=True)]
        joined = torch.full((sum(len(value) for value in values), *dims), spec.pad or 0, dtype=TORCH[spec.datatype])
        row = 0
        for value in values:
            joined[(slice(row, row + len(value)), *[slice(0, dim) for dim in value.shape[1:]])] = value
            row += len(value)
        return joined


def _cost(said: Any) -> float | None:
    """Check what `prepare` said of the request's cost; a tensor or an array of one number will do."""
    if said is None:
        return None
    try:
        cost = float(said)
    except (TypeError, ValueError, RuntimeError):
        cost = 0.0
    if not (isfinite(cost) and cost > 0):
        raise ContractError(f"prepare() gave the cost {said!r}; it must be a number above 0")
    return cost


def _lane(specs: Sequence[TensorSpec], prepared: Inputs) -> Any:
    """Prepared requests share a batch where their shapes agree in every dimension that may not be padded."""
    return tuple(
        None if spec.datatype == "BYTES" or spec.pad is not None else tuple(prepared[spec.name].shape[1:])
        for spec in specs
    )
