"""Devices: which one a replica runs on, and all that differs between them. Runs in the replica; imports torch."""

from __future__ import annotations

import mmap
import resource
from typing import Any

import torch

from forebay.errors import ConfigError


def resolve(name: str) -> torch.device:
    """Return the device that a setting names; `auto` is CUDA where there is one, else the CPU.

    Raises ConfigError where the device does not exist: nothing falls back to the CPU in silence.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
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


class Device:
    """What the runner asks of a device; this one is the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = "cpu"

    def pin(self, memory: mmap.mmap) -> str | None:
        """Make the staging memory ready for copies; return a note for the log where that failed."""
        return None

    def to_device(self, staged: torch.Tensor) -> torch.Tensor:
        """Copy a staged tensor: on the CPU too, so that a model that writes into its input spoils no second try."""
        return staged.clone()

    def to_host(self, result: torch.Tensor, place: torch.Tensor) -> None:
        """Copy a result to its place in the slot; it is there when this returns."""
        place.copy_(result)

    def recover(self) -> None:
        """Give cached memory back after an allocation failed."""

    def memory(self) -> dict[str, int]:
        """Return bytes by kind: resident, allocated, reserved, device_used, device_total."""
        return {"resident": _resident_bytes()}


class CudaDevice(Device):
    """A CUDA device. Slots are page-locked once; copies do not wait for each other, the result copy waits for all."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.set_device(device)
        self.name = torch.cuda.get_device_name(device)
        self._pinned = False

    def pin(self, memory: mmap.mmap) -> str | None:
        """Page-lock the staging memory."""
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        code = torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)  # type: ignore[no-untyped-call]
        self._pinned = int(code) == 0
        return None if self._pinned else f"staging memory is not page-locked (cudaHostRegister gave {int(code)})"

    def to_device(self, staged: torch.Tensor) -> torch.Tensor:
        """Copy a staged tensor; the slot stays as it is until the batch is done."""
        return staged.to(self.device, non_blocking=self._pinned)

    def to_host(self, result: torch.Tensor, place: torch.Tensor) -> None:
        """Copy a result to its slot and wait for it."""
        place.copy_(result, non_blocking=self._pinned)
        torch.cuda.current_stream(self.device).synchronize()

    def recover(self) -> None:
        """Give cached blocks back to the driver."""
        torch.cuda.empty_cache()

    def memory(self) -> dict[str, int]:
        """Return the allocator's and the device's figures."""
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "resident": _resident_bytes(),
            "allocated": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "device_used": total - free,
            "device_total": total,
        }


def open_device(name: str) -> Device:
    """Return the device that a setting names."""
    device = resolve(name)
    return CudaDevice(device) if device.type == "cuda" else Device(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; the CPU allocator raises a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)


def is_sticky(error: BaseException) -> bool:
    """Whether the device is lost to this process: only a new process helps."""
    kind: Any = getattr(torch, "AcceleratorError", None)
    return kind is not None and isinstance(error, kind)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
