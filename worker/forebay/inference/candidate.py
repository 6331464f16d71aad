"""One candidate of `forebay optimize`, measured in a process of its own: so that none disturbs or crashes another.

It loads the model as a replica would, takes its golden outputs in fp32, prunes and converts it, and measures it through
the forward that serves. What it may write are pruned weights that have passed the gate. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from forebay.errors import ForebayError, ModelError
from forebay.inference.devices import Device, open_device
from forebay.inference.golden import deviation, golden, run
from forebay.inference.loading import convert_as, load_plain, modules, name_of, where
from forebay.inference.messages import Start, Tried
from forebay.inference.model import Model, runs_in_steps
from forebay.inference.precision import refusal
from forebay.inference.pruning import TWO_FOUR, compress, prune
from forebay.inference.trials import try_out
from forebay.inference.verdicts import Answer, Question
from forebay.inference.warmup import SMALL_SECONDS, WORTH_THREADS, may_take_fewer, take_threads


def answer(question: Question) -> Answer:
    """Measure one candidate."""
    start = question.start
    found = Answer(Tried(start.precision, start.compile, sparsity=question.sparsity))
    try:
        device = open_device(start.device, start.memory_fraction)
        take_threads(start, device)
        found.device = device.name
        why = refusal(start.precision, device.device)
        if why is not None:
            found.tried.verdict = f"not here: {why.removeprefix(f'inference.precision {start.precision} ')}"
            return found
        if start.compile == "cudagraph" and not device.overlaps:
            found.tried.verdict = "not here: needs a CUDA device"
            return found
        _measure(question, device, found)
    except ForebayError as error:
        found.error = str(error)
    except Exception as error:
        found.error = f"the model fails: {where(error)}"
    return found


def _measure(question: Question, device: Device, found: Answer) -> None:
    start = question.start
    model = load_plain(start, device.device)
    if runs_in_steps(model) and start.compile != "none":
        found.tried.verdict = "not here: it compiles forward(), and the model runs in steps"
        return
    device.settle()
    known = golden(model, device.device, start.max_batch_size)
    found.notes += known.notes
    if question.sparsity:
        found.zeros = prune(modules(model), question.sparsity, question.share, name_of(model))
    if question.output:
        apart = deviation(model.outputs, known.outputs, run(model, known.inputs, known.rows, device.device))
        if apart > question.most:
            raise ModelError(
                f"{question.sparsity} pruning deviates by {apart:.2g} from the model, and {question.most:g} is "
                "allowed: nothing was written"
            )
        _write(model, Path(question.output))
        found.written = question.output
    try:
        if start.precision != "fp32":
            convert_as(model, start)
    except ForebayError as error:
        found.tried.verdict = f"not here: {str(error).removeprefix(f'inference.precision {start.precision} ')}"
        return
    if question.sparsity == TWO_FOUR and not compress(modules(model)):
        found.notes.append("2:4 was measured with dense kernels, which multiply by zeros, too: it gives no speed here")
    found.tried = _as_served(lambda: try_out(model, device, start, known), device, start)
    found.tried.sparsity = question.sparsity


def _as_served(measure: Callable[[], Tried], device: Device, start: Start) -> Tried:
    """Measure with one thread, too, where the warm-up would: a small model is served with that."""
    found = measure()
    if not may_take_fewer(device, start) or not 0 < found.full_seconds <= SMALL_SECONDS:
        return found
    torch.set_num_threads(1)
    alone = measure()
    return alone if 0 < alone.full_seconds <= found.full_seconds * WORTH_THREADS else found


def _write(model: Model, path: Path) -> None:
    from safetensors.torch import save_model

    tops = list(modules(model))
    if len(tops) != 1:
        raise ModelError(f"--output needs a model that holds one module, for model.weights to read; it has {len(tops)}")
    part = path.with_name(path.name + ".part")
    try:
        save_model(tops[0], str(part))
        part.replace(path)
    except OSError as error:
        raise ModelError(f"--output {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
