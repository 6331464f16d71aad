"""Trials: how fast a model runs as it would be served, and how far its outputs are from those in fp32. Imports torch.

Runs in the replica for `inference.precision: auto`, and in the processes of `forebay optimize`. A trial goes all the
way to the device and back, compiled where the settings say so; the golden inputs are the same for every candidate.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from forebay.errors import ConfigError, ModelError
from forebay.inference.caps import Caps
from forebay.inference.compilation import Faster, thaw
from forebay.inference.devices import Device, is_sticky
from forebay.inference.forwarding import Forward
from forebay.inference.golden import Golden, deviation
from forebay.inference.groups import Inputs, rows_of
from forebay.inference.launching import Launcher
from forebay.inference.loading import where
from forebay.inference.messages import Start, Tried
from forebay.inference.model import Model

_LEAST_RUNS = 15
_FEWEST_RUNS = 3
_ENOUGH_SECONDS, _SLOW_SECONDS = 0.3, 3.0


def try_out(model: Model, device: Device, start: Start, known: Golden) -> Tried:
    """Measure a model that is loaded and converted as `start` says. A failure is a verdict, not an exception."""
    tried = Tried(start.precision, start.compile)
    device.settle()  # what converted the model ran on another stream than its trials
    try:
        forward = Forward(model, start, device)
        if forward.compiled is not None:
            thaw()
        launcher = Launcher(device, forward, model.outputs, Caps(start.max_batch_size))
        rows = launcher.limit(0)
        outputs = _outputs(launcher, known, rows)
        tried.deviation = deviation(model.outputs, known.outputs, outputs)
        tried.full_rows = rows
        tried.full_seconds = _best(launcher, forward.compiled, _first_rows(known, rows), rows)
        tried.one_seconds = _best(launcher, forward.compiled, _first_rows(known, 1), 1)
    except ConfigError as error:
        tried.verdict = f"not here: {error}" if not isinstance(error, ModelError) else f"fails: {error}"
    except Exception as error:
        if is_sticky(error):
            raise
        tried.verdict = f"fails: {where(error)[:200]}"
    return tried


def _outputs(launcher: Launcher, known: Golden, limit: int) -> list[Any]:
    """Run the golden inputs, in pieces where a batch may not be so large."""
    pieces = [
        launcher.trial(_between(known, begin, min(begin + limit, known.rows)), min(limit, known.rows - begin))
        for begin in range(0, known.rows, limit)
    ]
    return [
        torch.cat(parts) if isinstance(parts[0], torch.Tensor) else [element for part in parts for element in part]
        for parts in zip(*pieces, strict=True)
    ]


def _between(known: Golden, begin: int, end: int) -> Inputs:
    return {name: rows_of(value, begin, end, known.rows) for name, value in known.inputs.items()}


def _first_rows(known: Golden, rows: int) -> Inputs:
    """Return a batch of `rows` golden rows, from the first on and round again."""
    found: Inputs = {}
    for name, value in known.inputs.items():
        if isinstance(value, torch.Tensor):
            found[name] = value[torch.arange(rows) % known.rows]
        else:
            width = len(value) // known.rows
            found[name] = [value[at % len(value)] for at in range(rows * width)]
    return found


def _best(launcher: Launcher, compiled: Faster | None, inputs: Inputs, rows: int) -> float:
    """Return the shortest time of a batch: whatever else the machine does only adds to it."""
    for _ in range(2):  # the first may compile
        launcher.trial(inputs, rows)
        if compiled is not None:
            compiled.record()
    best, spent, runs = float("inf"), 0.0, 0
    while spent < _ENOUGH_SECONDS or runs < (_LEAST_RUNS if spent < _SLOW_SECONDS else _FEWEST_RUNS):
        began = time.perf_counter()
        launcher.trial(inputs, rows)
        took = time.perf_counter() - began
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best
