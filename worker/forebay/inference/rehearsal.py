"""A rehearsal: batches through every staging slot before the first real one, so that no request pays for what is new.

Runs in the replica at the end of its start. The first touch of a page and the first pass through a piece of code cost
more than a small model's forward. What comes of these batches is dropped. Imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from forebay.inference.flights import Flight
from forebay.inference.messages import Measure, Measured, Placed, Run, Start
from forebay.inference.model import Model
from forebay.inference.runner import Runner
from forebay.inference.samples import cost_of, given_input, one_row, repeated, zeros
from forebay.inference.slots import Slot
from forebay.inference.staging import join_elements

_TURNS = 3


def rehearse(runner: Runner, model: Model, start: Start) -> None:
    """Run batches of the largest size that the slots hold, one slot after the other."""
    specs = runner.specs
    given = model.example() if not start.takes_prepared else None
    row = raw_row(specs, given)
    rows = max(min(start.max_batch_size, start.input_bytes // max(_size(row), 1)), 1)
    if start.max_cost is not None and not (runner.prepares or start.takes_prepared):
        rows = max(min(rows, start.max_cost // max(cost_of(row, 1, start.cost_unit), 1)), 1)
    turns = _TURNS * start.slots
    if runner.steps is not None:  # one is a whole run from begin to end
        rows = turns = 1
    for turn in range(turns):
        job = stage(runner, start, repeated(row, rows), rows, turn % start.slots)
        if job is not None:
            runner.run(job)
            runner.rehearsed[job.slot] = job


def measure(runner: Runner, asked: Measure) -> Measured:
    """Run the batches that the rehearsal left in the slots, over and over, launched and landed as real ones are."""
    jobs = list(runner.rehearsed.values())
    if not jobs:
        return Measured(0, 0.0)
    rows, turn, began = 0, 0, time.perf_counter()
    flight: Flight | None = runner.begin(jobs[0])
    while flight is not None:
        goes_on = time.perf_counter() - began < asked.for_seconds
        following = None
        if goes_on and len(jobs) > 1 and runner.may_overlap(flight):
            turn += 1
            following = runner.begin(jobs[turn % len(jobs)], beside=True)
        runner.finish(flight)
        rows += sum(flight.job.rows) or flight.job.requests
        if following is not None:
            runner.resume(following)
        elif goes_on:
            turn += 1
            following = runner.begin(jobs[turn % len(jobs)])
        flight = following
    return Measured(rows, time.perf_counter() - began)


def raw_row(specs: list[Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return one row as a request has it, before `prepare`: of what `example()` gave, else zeros."""
    if given is None:
        return {spec.name: zeros(spec) for spec in specs}
    inputs = {spec.name: given_input(spec, given) for spec in specs}
    return one_row(inputs, min(len(value) for value in inputs.values()), 0)


def _size(row: Mapping[str, Any]) -> int:
    """Return the bytes of a row in a slot, with what alignment may add."""
    return sum(
        64 + (value.nbytes if isinstance(value, torch.Tensor) else sum(len(part) + 4 for part in value))
        for value in row.values()
    )


def stage(runner: Runner, start: Start, inputs: Mapping[str, Any], rows: int, number: int) -> Run | None:
    """Write a batch into a slot as the loop would; None where it does not fit."""
    slot = Slot(runner.memory, number * start.slot_bytes, 0, start.input_bytes)
    placed: list[Placed] = []
    shapes: list[list[int]] = []
    for spec in runner.specs:
        value = inputs[spec.name]
        if isinstance(value, torch.Tensor):
            if value.nbytes > slot.room - 64:
                return None
            place, view = slot.place(spec, list(value.shape), 0)
            view.copy_(value)
            shapes.append([1, *value.shape[1:]])
        else:
            raw = join_elements(value)
            if len(raw) > slot.room - 64:
                return None
            place = slot.write(raw, len(value), 0)
            shapes.append([len(value) // rows])
        placed.append(place)
    return Run(0, number, rows, [], placed, [shapes] * rows if runner.prepares else [])
