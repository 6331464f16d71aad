"""A model that keeps a tally of every row it runs, so that a test can count what was computed twice."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import torch

from tests.models import Double


class Tally(Double):
    """Twice the row plus one; appends the first number of every real row to the file `tally`, one write per batch."""

    def __init__(self, tally: str, seconds: float = 0.0) -> None:
        super().__init__(seconds)
        self._file = os.open(tally, os.O_APPEND | os.O_CREAT | os.O_WRONLY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        real = [f"{value:.0f}\n" for value in x[:, 0].tolist() if value >= 1]  # the start tries less
        os.write(self._file, "".join(real).encode())
        return super().forward(x)


def recomputed(tally: Path, total: int) -> int:
    """Return how many rows were run again; fails if one of the requests 0 to `total` was never run."""
    runs = Counter(map(int, tally.read_text().split()))
    missing = [number for number in range(total) if not runs[number + 1]]
    assert not missing, f"{len(missing)} requests were never run: {missing[:5]}"
    return sum(runs.values()) - len(runs)
