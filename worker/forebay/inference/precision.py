"""What a model computes in: which precisions a device has, and how a loaded model is converted. Imports torch.

Runs in the replica, between `load` and the warm-up. It knows no requests and decides nothing: `adoption` measures what
a conversion does to the outputs. TF32 is on only where it was named: torch leaves it on for convolutions by itself.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from forebay.errors import ConfigError

QUANTISED = {"int8": 5e-2, "int8_weight_only": 1e-2, "float8": 1e-1, "int4": 1e-1}
"""Those that torchao does, and the relative difference that a row may have from itself: about what a few
steps of theirs make of it, where the last bits, which depend on the batch's size, let something round the other way.
"""

REDUCED = 1e-2
"""The same for 16-bit types."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16, "int4": torch.bfloat16}
_INSTALL = "install the extra quantization (pip install 'forebay[quantization]'), or set inference.precision to bf16"
_INT4_KERNELS = "mslk"
_AMPERE, _ADA = (8, 0), (8, 9)


def dtype_of(precision: str) -> torch.dtype | None:
    """Return what weights and fractions are cast to; None where they stay as they are."""
    return _DTYPES.get(precision)


def tolerance(precision: str) -> float:
    """Return the relative difference that batching alone may make to a row's outputs, on the CPU."""
    if precision == "fp32":
        return 1e-5
    return QUANTISED.get(precision, REDUCED)


def refusal(precision: str, device: torch.device) -> str | None:
    """Say in one sentence why this machine has no such precision; None where it has."""
    if precision == "tf32":
        return _needs_cuda(precision, device, _AMPERE)
    if precision not in QUANTISED:
        return None
    if precision == "float8" and (why := _needs_cuda(precision, device, _ADA)):
        return why
    if precision == "int4" and (why := _needs_cuda(precision, device, _AMPERE)):
        return why
    if importlib.util.find_spec("torchao") is None:
        return f"inference.precision {precision} needs torchao: {_INSTALL}"
    if precision == "int4" and importlib.util.find_spec(_INT4_KERNELS) is None:
        return (
            f"inference.precision int4 needs the kernels of {_INT4_KERNELS}: pip install {_INT4_KERNELS}, or set "
            "inference.precision to int8_weight_only"
        )
    return None


def check(precision: str, device: torch.device) -> None:
    """Raise ConfigError where this machine has no such precision: nothing else is taken in its place."""
    why = refusal(precision, device)
    if why is not None:
        mend = "" if "set inference.precision" in why else "; set inference.precision to bf16, or to auto"
        raise ConfigError(why + mend)


def set_matmul(precision: str) -> None:
    """Turn TF32 on where it is asked for and off where it is not; a model's own code may still say otherwise."""
    named = precision == "tf32"
    torch.set_float32_matmul_precision("high" if named else "highest")
    torch.backends.cudnn.allow_tf32 = named


def uses_tf32() -> bool:
    """Whether products may keep ten bits, whichever of torch's two ways of saying so a model's code took.

    The older flags cannot be read once the newer ones were set: torch raises.
    """
    newer: Any = torch.backends
    return "tf32" in (newer.cuda.matmul.fp32_precision, newer.cudnn.conv.fp32_precision, newer.cudnn.rnn.fp32_precision)


def convert(tops: Iterable[nn.Module], precision: str, who: str) -> None:
    """Convert modules in place. Raises ConfigError for a model that has nothing to convert."""
    held = list(tops)
    dtype = dtype_of(precision)
    if precision in QUANTISED and not any(isinstance(part, nn.Linear) for top in held for part in top.modules()):
        raise ConfigError(
            f"inference.precision {precision} quantises the linear layers of a model's modules, and {who} has none "
            "that can be seen; set inference.precision to fp32 or bf16"
        )
    for top in held:
        if dtype is not None:
            top.to(dtype)
        if precision in QUANTISED:
            _quantise(top, precision, who)
            top.requires_grad_(False)


def _quantise(top: nn.Module, precision: str, who: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchao warns of its own imports
            from torchao.quantization import quantize_

            quantize_(top, _config(precision))
    except (ImportError, RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"inference.precision {precision}: torchao cannot quantise {who}: {said}; set inference.precision to bf16"
        ) from error


def _config(precision: str) -> Any:
    import torchao.quantization as ao

    made: dict[str, Callable[[], Any]] = {
        "int8": lambda: ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
        "int8_weight_only": lambda: ao.Int8WeightOnlyConfig(set_inductor_config=False),
        "float8": lambda: ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()),
        "int4": lambda: ao.Int4WeightOnlyConfig(),
    }
    return made[precision]()


def _needs_cuda(precision: str, device: torch.device, least: tuple[int, int]) -> str | None:
    needed = f"a CUDA device of compute capability {least[0]}.{least[1]} or later"
    if device.type != "cuda":
        return f"inference.precision {precision} needs {needed}, and inference.device is {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found >= least:
        return None
    return f"inference.precision {precision} needs {needed}, and {device} has {found[0]}.{found[1]}"
