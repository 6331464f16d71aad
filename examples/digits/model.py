"""A digit reader that trains itself in about a second: no weights to ship, and exact labels for tests.

Runs in a replica. The training is full-batch L-BFGS from a fixed seed on the CPU, whatever the device: every
worker that loads it holds the same network.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from forebay import Model, TensorSpec

SEED = 7
DARKEST = 16.0


class Digits(Model):
    """Reads 8 x 8 grey values from 0 (paper) to 16 (ink), row by row."""

    inputs = (TensorSpec("pixels", "FP32", [-1, 64]),)
    outputs = (TensorSpec("digit", "INT64", [-1]), TensorSpec("probabilities", "FP32", [-1, 10]))

    def load(self, device: torch.device) -> None:
        """Train on the four fifths of scikit-learn's digits that are not held out."""
        from .samples import learned

        pixels, digits = learned()
        self.net = train(torch.tensor(pixels), torch.tensor(digits)).eval().to(device)

    def forward(self, pixels: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Read a batch."""
        probabilities = self.net(pixels / DARKEST).float().softmax(-1)
        return {"digit": probabilities.argmax(-1), "probabilities": probabilities}


def train(pixels: torch.Tensor, digits: torch.Tensor) -> nn.Module:
    """Fit 64 → 64 → 10 to no mistake on what it is shown; a little weight decay keeps it right beyond."""
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        optimiser = torch.optim.LBFGS(net.parameters(), max_iter=100, history_size=10, line_search_fn="strong_wolfe")

        def loss() -> float:
            optimiser.zero_grad()
            weights = torch.stack([parameter.square().sum() for parameter in net.parameters()]).sum()
            value = nn.functional.cross_entropy(net(pixels / DARKEST), digits) + 1e-4 * weights
            value.backward()
            return float(value.detach())

        optimiser.step(loss)
    return net
