"""Warm-up: every bucket in every allowed size runs before the worker joins its group. Runs in the replica.

A failure stops the start, but a size that does not fit into the device's memory becomes a cap as long as a smaller one
fits. Imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, prod

import torch

from forebay.inference.declared import ContractError
from forebay.inference.devices import Device, is_out_of_memory
from forebay.inference.groups import Inputs
from forebay.inference.loading import verify_eval
from forebay.inference.messages import Start
from forebay.inference.model import Model
from forebay.inference.runner import Runner, check_model_contract
from forebay.inference.samples import cost_of, first_row, ragged_specs, repeated, size_of, with_lengths

_RUNS = 3
SMALL_SECONDS = 0.02
"""A full batch that takes longer is worth several threads on a CPU, and a second warm-up is not worth it."""

WORTH_THREADS = 1.3
"""How much faster several threads have to be than one."""


@dataclass(slots=True)
class WarmUp:
    """What was measured: (bucket, rows, best seconds) and, where the device can say, (bucket, rows, peak bytes)."""

    curve: list[tuple[int, int, float]] = field(default_factory=list)
    peaks: list[tuple[int, int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def sizes(largest: int) -> list[int]:
    """Return the powers of two up to `largest`, and `largest`."""
    found = [1]
    while found[-1] * 2 < largest:
        found.append(found[-1] * 2)
    return found if largest == 1 else [*found, largest]


def warm_up(runner: Runner, model: Model, device: Device, start: Start) -> WarmUp:
    """Run each allowed size (else each power of two) of each bucket three times.

    The rows come from the model's `example()`, else they are zeros, or ones where zero is padding. Raises ModelError
    where the model fails.
    """
    specs = list(model.prepared or model.inputs)
    row, found = first_row(model), WarmUp()
    lengths = start.buckets if ragged_specs(specs) else []
    for shaped in [with_lengths(specs, row, length) for length in lengths] or [row]:
        bucket = sum(prod(shaped[spec.name].shape[1:]) for spec in ragged_specs(specs))
        _warm_bucket(runner, model, device, start, (bucket, shaped), found)
    verify_eval(model)
    if not any(dim == -1 and spec.pad is None for spec in specs for dim in list(spec.shape)[1:]):
        runner.predict(found.peaks)  # else rows of one bucket differ in size, and one measurement says nothing
    try:
        given = model.example()  # asked once: that it fails later says nothing about the model
        runner.remember(lambda: repeated(first_row(model, given), 1))  # a copy: forward may write into its input
    except Exception as error:
        raise check_model_contract(error) from error
    return found


def _warm_bucket(
    runner: Runner, model: Model, device: Device, start: Start, shaped: tuple[int, Inputs], found: WarmUp
) -> None:
    bucket, row = shaped
    fitted, prepares = 0, runner.prepares or start.takes_prepared
    for rows in start.sizes or sizes(start.max_batch_size):
        inputs = repeated(row, rows)
        if not runner.prepares and size_of(inputs) > start.input_bytes:
            break  # no batch of this shape is ever so large: it would not fit into a slot
        if fitted and not prepares and cost_of(inputs, rows, start.cost_unit) > (start.max_cost or float("inf")):
            break  # a batch of several requests never weighs so much; with prepare, others say what they weigh
        device.reset_peak()
        error = _run(runner, inputs, rows, bucket, found)
        if error is not None:
            if not (is_out_of_memory(error) and fitted):
                verify_eval(model)  # a batch norm in training mode fails with one row, in words that help nobody
                raise check_model_contract(error, _mend(model, start, error)) from error
            del inputs
            error.__traceback__ = None  # its frames hold the batch
            device.recover()
            runner.memory_caps.refused(bucket, rows, fitted)
            found.notes.append(f"{rows} rows{_of(bucket)} do not fit into the device's memory: the cap is {fitted}")
            break
        fitted = rows
        peak = device.peak()
        if peak:
            found.peaks.append((bucket, rows, peak))


def _run(runner: Runner, inputs: Inputs, rows: int, bucket: int, found: WarmUp) -> Exception | None:
    best = float("inf")
    try:
        for _ in range(_RUNS if runner.steps is None else 1):
            began = time.perf_counter()
            runner.trial(inputs, rows)
            best = min(best, time.perf_counter() - began)
    except Exception as error:
        return error
    found.curve.append((bucket, rows, best))
    return None


def _mend(model: Model, start: Start, error: Exception) -> str:
    """Say what helps a model that may be right and was only tried with a request that it never gets."""
    if "per channel when training" in str(error):
        return "; a normalisation runs in training mode and would mix a batch's requests: call it with training=False"
    if start.factory is None or isinstance(error, ContractError) or is_out_of_memory(error):
        return ""
    if model.example() is not None:
        return ""
    return (
        "; it was tried with zeros, or ones where zero is padding: if it takes none, let its example() return a request"
    )


def _of(bucket: int) -> str:
    return f" of {bucket} elements" if bucket else ""


def take_threads(start: Start, device: Device) -> None:
    """Take the threads that the settings give; else, on a CPU, at most torch's own, which OMP_NUM_THREADS may bound."""
    if start.threads is not None:
        torch.set_num_threads(start.threads)
    elif start.cpu_threads and device.device.type == "cpu":
        torch.set_num_threads(min(start.cpu_threads, torch.get_num_threads()))


def may_take_fewer(device: Device, start: Start) -> bool:
    """Whether one thread may be tried where the settings name no number: what is compiled is made for as many."""
    is_free = start.threads is None and start.cpu_threads > 0 and start.compile == "none"
    return is_free and device.name == "cpu" and torch.get_num_threads() > 1


def with_fewer_threads(warm: WarmUp, again: Callable[[], WarmUp]) -> WarmUp:
    """Return a small model's warm-up with one thread, which is kept, unless several do clearly better.

    The threads of a small model wait for each other longer than they compute, and the more so the busier the cores are:
    at the start they are idle as they never will be again. `again` warms up once more.
    """
    threads = torch.get_num_threads()
    bucket, rows, seconds = max(warm.curve, key=lambda point: point[2], default=(0, 0, inf))
    if threads == 1 or seconds > SMALL_SECONDS:
        return warm
    torch.set_num_threads(1)
    alone = again()
    if min((point[2] for point in alone.curve if point[:2] == (bucket, rows)), default=inf) <= seconds * WORTH_THREADS:
        return alone
    torch.set_num_threads(threads)
    return warm
