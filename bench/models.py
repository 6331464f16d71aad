"""The models of the benchmarks."""

from __future__ import annotations

import time

import torch
from torch import nn

from forebay import Model, TensorSpec


def make_perceptron() -> nn.Module:
    """Make three layers, 384 to 10."""
    torch.manual_seed(0)
    layers = (nn.Linear(384, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(*layers).eval()


class Perceptron(Model):
    """The perceptron that the hand-written loop runs, too."""

    inputs = (TensorSpec("x", "FP32", [-1, 384]),)
    outputs = (TensorSpec("y", "FP32", [-1, 10]),)

    def load(self, device: torch.device) -> None:
        """Build it."""
        self.net = make_perceptron().to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run a batch."""
        return self.net(x)


class Identity(Model):
    """Returns its 256 bytes: what is left is Forebay's own work."""

    inputs = (TensorSpec("x", "UINT8", [-1, 256]),)
    outputs = (TensorSpec("y", "UINT8", [-1, 256]),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the batch."""
        return x


class Busy(Model):
    """A deep perceptron that keeps one core busy for some milliseconds per batch of 32."""

    inputs = (TensorSpec("x", "FP32", [-1, 384]),)
    outputs = (TensorSpec("y", "FP32", [-1, 10]),)

    def __init__(self, layers: int = 12, width: int = 2048) -> None:
        self._layers = layers
        self._width = width

    def load(self, device: torch.device) -> None:
        """Build it."""
        torch.manual_seed(0)
        middle = [part for _ in range(self._layers) for part in (nn.Linear(self._width, self._width), nn.ReLU())]
        net = nn.Sequential(nn.Linear(384, self._width), *middle, nn.Linear(self._width, 10))
        self.net = net.eval().to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run a batch."""
        return self.net(x)


class Timed(Model):
    """Takes a known time for a batch and no core: `fixed_ms`, and `row_ms` for each row; compares dispatch modes."""

    inputs = (TensorSpec("x", "UINT8", [-1, 256]),)
    outputs = (TensorSpec("y", "UINT8", [-1, 1]),)

    def __init__(self, fixed_ms: float = 20.0, row_ms: float = 1.0) -> None:
        self._fixed = fixed_ms / 1000
        self._row = row_ms / 1000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Wait out the batch's time."""
        time.sleep(self._fixed + self._row * len(x))
        return x[:, :1]


class Logged(Busy):
    """Writes when each forward began and ended: how long the replica had nothing to do in between."""

    def __init__(self, path: str, layers: int = 1) -> None:
        super().__init__(layers)
        self._path = path

    def load(self, device: torch.device) -> None:
        """Build it and open the log."""
        super().load(device)
        self._log = open(self._path, "w", buffering=1)  # noqa: SIM115

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run a batch, and say when that was."""
        began = time.perf_counter()
        result = super().forward(x)
        self._log.write(f"{began} {time.perf_counter()} {len(x)}\n")
        return result


class Large(Model):
    """Takes 175 KB per request and is slow enough for a backlog to stay: for the memory of the parent process."""

    inputs = (TensorSpec("image", "UINT8", [-1, 175_000]),)
    outputs = (TensorSpec("mean", "FP32", [-1]),)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Average each row."""
        return image.float().mean(-1)


class Steady(Model):
    """Takes 5 ms for a batch, however large, and no processor: as a loop sees a model on an accelerator."""

    inputs = (TensorSpec("x", "UINT8", [-1, 256]),)
    outputs = (TensorSpec("y", "UINT8", [-1, 256]),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the batch after a while."""
        time.sleep(0.005)
        return x
