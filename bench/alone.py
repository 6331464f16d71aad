"""The model alone, on one core: `python alone.py ROWS BATCHES` prints rows per second."""

from __future__ import annotations

import sys
import time

import torch
from models import Busy


def main() -> None:
    """Run full batches one after the other."""
    rows, batches = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    model = Busy()
    model.load(torch.device("cpu"))
    batch = torch.rand(rows, 384)
    with torch.inference_mode():
        for _ in range(10):
            model.forward(batch)
        began = time.perf_counter()
        for _ in range(batches):
            model.forward(batch)
    print(rows * batches / (time.perf_counter() - began))


if __name__ == "__main__":
    main()
