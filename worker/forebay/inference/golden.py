"""Golden inputs: rows whose outputs in fp32 are the measure of every other precision. Imports torch.

Runs in the replica. They are the rows of the model's `example()`, and varied ones where it has fewer: see `samples`. A
model's own rows say more than invented ones, so a note tells which they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forebay.inference.completion import whole_call
from forebay.inference.declared import as_declared
from forebay.inference.groups import Inputs
from forebay.inference.model import MOST_STEPS, Model, TensorSpec
from forebay.inference.samples import collated, distinct_rows, example_rows, first_row, repeated

ROWS = 16
_LEAST_SCALE = 1e-6


@dataclass(slots=True)
class Golden:
    """Rows as one batch, and what the model made of them in fp32."""

    inputs: Inputs
    rows: int
    outputs: list[Any]
    notes: list[str]


def golden(model: Model, device: torch.device, most: int = ROWS) -> Golden:
    """Run the golden inputs through a model as it was loaded. What its forward raises leaves as it is."""
    specs = list(model.prepared or model.inputs)
    given = example_rows(model)
    notes = (
        [] if given is not None else ["golden inputs are invented; let example() return real rows, the more the better"]
    )
    rows = distinct_rows(model, min(max(given[1] if given else 0, ROWS), most))
    try:
        batch = collated(specs, rows)
        outputs = run(model, batch, len(rows), device)
    except Exception:
        batch = repeated(first_row(model), len(rows))  # varied rows may be none for this model
        outputs = run(model, batch, len(rows), device)
        notes.append("golden inputs repeat one row, since the model refused others; let example() return several")
    return Golden(batch, len(rows), outputs, notes)


def run(model: Model, inputs: Inputs, rows: int, device: torch.device, dtype: torch.dtype | None = None) -> list[Any]:
    """Run a model on rows; return its outputs on the host. `dtype` is what fractions are cast to."""
    moved = {name: _moved(value, device, dtype) for name, value in inputs.items()}
    with torch.inference_mode():
        returned = whole_call(model, MOST_STEPS)(**moved)
    named = returned if isinstance(returned, dict) else {model.outputs[0].name: returned}
    found = [as_declared(spec, named[spec.name], rows) for spec in model.outputs]
    return [value.cpu() if isinstance(value, torch.Tensor) else value for value in found]


def deviation(specs: Sequence[TensorSpec], reference: Sequence[Any], outputs: Sequence[Any]) -> float:
    """Return how far outputs are from the reference: the worst of all outputs.

    Fractions: the largest difference, relative to the reference's largest number. Whole numbers and texts: the share of
    them that changed; bytes may be rounded fractions, so one step is none.
    """
    return max(_apart(spec, one, other) for spec, one, other in zip(specs, reference, outputs, strict=True))


def _apart(spec: TensorSpec, reference: Any, output: Any) -> float:
    if not isinstance(reference, torch.Tensor):
        flipped: int = sum(one != other for one, other in zip(reference, output, strict=True))
        return flipped / max(len(reference), 1)
    if reference.shape != output.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    one, other = reference.double(), output.double()
    if not reference.is_floating_point():
        steps = (one - other).abs()
        changed = steps > (1 if spec.datatype in ("UINT8", "INT8") else 0)
        return float(changed.double().mean())
    if not torch.equal(torch.isfinite(one), torch.isfinite(other)):
        return float("inf")
    one, other = torch.nan_to_num(one, 0.0, 0.0, 0.0), torch.nan_to_num(other, 0.0, 0.0, 0.0)
    largest: float = max(float(one.abs().max()), _LEAST_SCALE)
    return float((one - other).abs().max()) / largest


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.to(device, copy=True)  # forward may write into it
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value
