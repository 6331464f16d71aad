"""The device as the runner sees it; here the CPU, where everything is done when a call returns. Imports torch."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from forebay.inference.precision import tolerance

Copy = tuple[torch.Tensor, torch.Tensor]
"""A result and its place in the slot."""


class Landing(Protocol):
    """Results on their way to the host. It holds whatever the device still reads: drop it only when they are there."""

    def is_done(self) -> bool: ...
    def wait(self) -> None: ...


class _Landed:
    """Results that are there already."""

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


LANDED = _Landed()
_HERE: AbstractContextManager[None] = nullcontext()


class Device:
    """The CPU. `overlaps` says whether a batch can be launched while another computes: not here."""

    overlaps = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = "cpu"

    def pin(self, memory: mmap.mmap) -> str | None:
        """Make the staging memory ready for copies; return a note for the log where that failed."""
        return None

    def unpin(self, memory: mmap.mmap) -> None:
        """Let go of the staging memory, before it is unmapped."""

    def settle(self) -> None:
        """Wait for everything that was begun, such as the copies of a model's weights."""

    def upload(self, staged: Mapping[str, Any]) -> dict[str, Any]:
        """Copy staged tensors: here too, so that a model that writes into its input spoils no second try."""
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in staged.items()}

    def computing(self) -> AbstractContextManager[None]:
        """Return what to enter around a forward, in the thread that runs it."""
        return _HERE

    def download(self, copies: Sequence[Copy], keep: object = None) -> Landing:
        """Copy results to their places in the slot."""
        for result, place in copies:
            place.copy_(result)
        return LANDED

    def abandon(self) -> None:
        """Take note that a forward failed, which may have left work behind."""

    def recover(self) -> None:
        """Give cached memory back after an allocation failed."""

    def reset_peak(self) -> None:
        """Begin to measure the most memory that is taken at once."""

    def peak(self) -> int:
        """Return the most bytes that batches have taken at once since `reset_peak`; 0 where the device cannot say."""
        return 0

    def room(self) -> int | None:
        """Return the bytes that batches may take above what was taken at `reset_peak`; None where nobody can say."""
        return None

    def tolerance(self, precision: str) -> float:
        """Return the relative difference that batching alone may make to a row's outputs."""
        return tolerance(precision)

    def memory(self) -> dict[str, int]:
        """Return bytes by kind: resident, allocated, reserved, device_used, device_total, device_process."""
        return {"resident": resident_bytes()}


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
