"""Models of which two replicas do more than one, and of which they do less."""

from __future__ import annotations

import fcntl
import tempfile
import time
from pathlib import Path

import torch

from tests.models import Plain


class Sleeps(Plain):
    """Keeps nothing busy: several replicas wait side by side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return super().forward(x)


class Crowds(Plain):
    """Takes a device that only one can have, and loses time where another one wants it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with (Path(tempfile.gettempdir()) / "forebay-test-crowds.lock").open("w") as device:
            try:
                fcntl.flock(device, fcntl.LOCK_EX | fcntl.LOCK_NB)
                time.sleep(0.01)
            except OSError:
                fcntl.flock(device, fcntl.LOCK_EX)
                time.sleep(0.03)
        return super().forward(x)
