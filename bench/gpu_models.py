"""The models of `gpu.py`: bytes in, one number per row out."""

from __future__ import annotations

import torch
from torch import nn

from forebay import Model, TensorSpec


class Wide(Model):
    """Products large enough that a batch keeps a GPU busy for about a millisecond."""

    inputs = (TensorSpec("x", "UINT8", [-1, 1_024]),)
    outputs = (TensorSpec("y", "FP32", [-1]),)

    def __init__(self, layers: int = 8, width: int = 4_096) -> None:
        self._layers = layers
        self._width = width

    def load(self, device: torch.device) -> None:
        """Build it."""
        torch.manual_seed(0)
        middle = [part for _ in range(self._layers) for part in (nn.Linear(self._width, self._width), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(1_024, self._width), *middle, nn.Linear(self._width, 1)).eval().to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run a batch."""
        return self.net(x.float() / 255).squeeze(1)


class Deep(Model):
    """Many small kernels: launching them takes longer than they do, and graphs pay."""

    inputs = (TensorSpec("x", "FP32", [-1, 512]),)
    outputs = (TensorSpec("y", "FP32", [-1, 512]),)

    def load(self, device: torch.device) -> None:
        """Build it."""
        torch.manual_seed(0)
        parts = [part for _ in range(24) for part in (nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU())]
        self.net = nn.Sequential(*parts).eval().to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run a batch."""
        return self.net(x)  # type: ignore[no-any-return]


class Copies(Model):
    """Hardly any work for 8 KB per row: what is left is copying in and out."""

    inputs = (TensorSpec("x", "UINT8", [-1, 8_192]),)
    outputs = (TensorSpec("y", "FP32", [-1]),)

    def load(self, device: torch.device) -> None:
        """Build nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run a batch."""
        return x.float().mean(1)


class Nothing(Model):
    """No work at all: the ceiling of Kafka and Python."""

    outputs = (TensorSpec("y", "UINT8", [-1, 4]),)

    def __init__(self, size: int) -> None:
        self.inputs = (TensorSpec("x", "UINT8", [-1, size]),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first bytes of every row."""
        return x[:, :4]
