"""The models of `bench/prepare.py`: the examples, with a device to wait for and with padding that is counted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from examples.image_classifier.model import ImageClassifier
from examples.text_embedder.model import TextEmbedder


class Remote(ImageClassifier):
    """Decodes as the image classifier does; in place of the network it waits, as a loop waits for an accelerator.

    What it leaves free is the core: the only thing that a CPU cannot show is a device that is not the CPU.
    """

    def __init__(self, ms_per_photo: float = 1.0) -> None:
        self._seconds = ms_per_photo / 1000

    def load(self, device: torch.device) -> None:
        """Load nothing."""

    def forward(self, pixels: torch.Tensor) -> Mapping[str, Any]:
        """Wait for as long as a device would take."""
        rows = len(pixels)
        time.sleep(self._seconds * rows)
        probabilities = torch.full((rows, 1000), 0.001)
        return {"label": [b"photo"] * rows, "score": probabilities[:, 0], "probabilities": probabilities}


class Counted(TextEmbedder):
    """The text embedder; notes for each batch its tokens, what they are padded to, and the seconds that it took."""

    def __init__(self, notes: str) -> None:
        self._notes = Path(notes)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Embed a batch and note it; the warm-up's zeros have no token."""
        began = time.perf_counter()
        embedded = super().forward(ids, mask)
        tokens = int(mask.sum())
        if tokens:
            with self._notes.open("a") as file:
                file.write(f"{tokens} {mask.numel()} {time.perf_counter() - began}\n")
        return embedded

    def example(self) -> None:
        """Let the warm-up take zeros."""
        return
