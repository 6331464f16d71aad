"""Devices: which one a replica runs on, and all that differs between them. Runs in the replica; imports torch.

`auto` means CUDA where there is some, else the CPU. Nothing else ever falls back: a device that is named and not there
stops the start. The fake accelerator is there for tests and has to be asked for by name.
"""

from __future__ import annotations

from typing import Any

import torch

from forebay.errors import ConfigError
from forebay.inference.devices.accelerator import Accelerator
from forebay.inference.devices.cpu import LANDED, Device, Landing

__all__ = ["LANDED", "Accelerator", "Device", "Landing", "is_out_of_memory", "is_sticky", "open_device", "resolve"]

_NO_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""What is said where memory is short outside of torch's own allocator on a device, which raises a type of its own."""


_KNOWN = "auto, cpu, cuda or cuda:N"


def resolve(name: str) -> torch.device:
    """Return the device that a setting names; `auto` is CUDA where there is one, else the CPU. A fake one is the CPU.

    Raises ConfigError where the device does not exist: nothing falls back to the CPU in silence.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if _is_fake(name):
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"inference.device {name!r} is not a device: set it to {_KNOWN}") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"inference.device is {name}, but torch {torch.__version__} sees no CUDA device here: set it to auto "
                "or cpu, or mend the driver (nvidia-smi) or the build of torch"
            )
        if (device.index or 0) >= (found := torch.cuda.device_count()):
            there = "cuda:0" if found == 1 else f"cuda:0 to cuda:{found - 1}"
            raise ConfigError(
                f"inference.device is {name}, but there is only {there} here: set it to one of those, or auto"
            )
        return torch.device("cuda", device.index or 0)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"inference.device {name!r} is not supported: set it to {_KNOWN}")
    return device


def open_device(name: str, memory_fraction: float | None = None) -> Device:
    """Return the device that a setting names. `memory_fraction` is what this process may take of its memory."""
    if _is_fake(name):
        from forebay.inference.devices.fake import FakeBackend, parse

        return Accelerator(FakeBackend(parse(name), memory_fraction))
    device = resolve(name)
    if device.type == "cuda":
        from forebay.inference.devices.cuda import CudaBackend

        return Accelerator(CudaBackend(device, memory_fraction))
    return Device(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, of torch's or of a library's own; the CPU allocator raises a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)


def is_sticky(error: BaseException) -> bool:
    """Whether the device is lost to this process: only a new process helps."""
    kind: Any = getattr(torch, "AcceleratorError", None)
    return kind is not None and isinstance(error, kind) and not is_out_of_memory(error)


def _is_fake(name: str) -> bool:
    return name == "fake" or name.startswith(("fake:", "fake?"))
