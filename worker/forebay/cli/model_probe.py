"""Loads a model as a replica would and prints what it found as JSON; `forebay check` runs it as a process of its own.

So torch stays out of the command, and a model that crashes its process is an answer like any other.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.inference.messages import Start
    from forebay.inference.model import Model


def probe(question: bytes) -> dict[str, Any]:
    """Resolve the device, load and try the model, and describe both; `{"error": …}` for what a worker would refuse."""
    import msgspec

    from forebay.errors import ForebayError
    from forebay.inference.messages import Start

    start = msgspec.json.decode(question, type=Start)
    found: dict[str, Any] = {}
    try:
        import torch

        from forebay.inference import devices, loading
    except ImportError as error:
        return {"error": f"torch cannot be imported: {error}", "question": "torch"}
    found["torch"] = torch.__version__
    try:
        device = devices.resolve(start.device)
    except ForebayError as error:
        return found | {"error": str(error), "question": "device"}
    found["device"] = str(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found |= {"device_name": torch.cuda.get_device_name(device), "free_bytes": free, "total_bytes": total}
    try:
        model = loading.load(start, device)
    except ForebayError as error:
        return found | {"error": str(error), "question": "model", "cause": cause_of(error)}
    if start.takes_prepared and (wrong := _try_prepare(start)):
        return found | {"error": wrong, "question": "model", "cause": "prepare"}
    if wrong := _try_forward(model, start):
        return found | {"error": wrong, "question": "model", "cause": "code"}
    for side in ("inputs", "outputs"):
        found[side] = [f"{spec.name} {spec.datatype}{list(spec.shape)}" for spec in getattr(model, side)]
    return found


def _try_prepare(start: Start) -> str | None:
    """Load the model as a preparer would and prepare its example; return what is wrong with it."""
    from mmap import mmap

    from forebay.errors import ForebayError
    from forebay.inference import loading, preparer

    try:
        preparer.try_out(loading.load_prepare(start), mmap(-1, 1))
    except ForebayError as error:
        return str(error)
    return None


def _try_forward(model: Model, start: Start) -> str | None:
    """Run the smallest batches of a replica's warm-up, and its self-check; return what would stop the start.

    Nothing is compiled and large batches do not run: those take as long as the start itself.
    """
    from mmap import mmap

    import msgspec

    from forebay.errors import ForebayError
    from forebay.inference.devices import open_device
    from forebay.inference.loading import where
    from forebay.inference.runner import Runner
    from forebay.inference.selfcheck import self_check
    from forebay.inference.warmup import warm_up

    precision = "fp32" if start.precision == "auto" else start.precision
    plain = msgspec.structs.replace(start, compile="none", precision=precision, input_bytes=sys.maxsize)
    first = msgspec.structs.replace(plain, max_batch_size=min(start.max_batch_size, 2), sizes=sorted(start.sizes)[:1])
    try:
        device = open_device(start.device, start.memory_fraction)
        runner = Runner(model, device, plain, mmap(-1, 1))
        warm_up(runner, model, device, first)
        if start.self_check:
            self_check(runner, model, plain, device.tolerance(precision))
    except ForebayError as error:
        return str(error)
    except Exception as error:
        return f"the model failed its warm-up: {where(error)}"
    return None


def cause_of(error: Exception) -> str:
    """Name what has to be mended for a model to load, as a key of `check_machine.FIXES`."""
    told, behind = str(error), error.__cause__
    if told.startswith("inference.precision"):
        return "precision"
    if isinstance(behind, SyntaxError):
        return "syntax"
    if isinstance(behind, ImportError):
        return "factory" if "there is no module" in told else "import"
    if "with model.options failed" in told:
        return "options"
    if told.startswith("model.weights"):
        return "weights"
    return "factory" if behind is None and told.startswith(("model.factory", "model.path")) else "code"


def main() -> None:
    """Read the question from standard input, answer on standard output; the model's own prints go to standard error."""
    import orjson

    question = sys.stdin.buffer.read()
    with contextlib.redirect_stdout(sys.stderr):
        answer = probe(question)
    sys.stdout.buffer.write(orjson.dumps(answer))


if __name__ == "__main__":
    main()
