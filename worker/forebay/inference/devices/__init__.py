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
        raise ConfigError(f"inference.device {name!r} is not a device (auto, cpu, cuda, cuda:1)") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"inference.device is {name}, but torch {torch.__version__} sees no CUDA device")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"inference.device is {name}, but there are {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", device.index or 0)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"inference.device {name!r} is not supported; use auto, cpu or cuda")
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
    """Whether an allocation failed; the CPU allocator raises a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)


def is_sticky(error: BaseException) -> bool:
    """Whether the device is lost to this process: only a new process helps."""
    kind: Any = getattr(torch, "AcceleratorError", None)
    return kind is not None and isinstance(error, kind)


def _is_fake(name: str) -> bool:
    return name == "fake" or name.startswith(("fake:", "fake?"))
