"""A model whose native code keeps the interpreter for itself: nothing else of its process runs meanwhile."""

from __future__ import annotations

import ctypes

import torch

from tests.models import Double

STALL = 777


class Stalling(Double):
    """Twice the row plus one; where a row begins with `STALL` it holds the interpreter for `stall` seconds first."""

    def __init__(self, stall: float) -> None:
        super().__init__()
        self._microseconds = int(stall * 1e6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x[:, 0] == STALL).any():
            ctypes.PyDLL(None).usleep(self._microseconds)  # PyDLL, other than CDLL, lets nobody else run
        return super().forward(x)
