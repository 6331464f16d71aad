"""Models for tests of the worker: answers that can be checked, and rows that break whatever runs them.

A row's first number decides. From 0 up the answer is twice the row plus one; the negative numbers are `Magic`. A `gate`
is a file: while it exists, every batch waits in front of it, so that a test decides when a model is slow.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import torch

from forebay import Model, TensorSpec
from tests.magic import Magic

WIDE = 175_000
"""Bytes of a request of the model `Wide`."""


def wait_at(gate: Path | None) -> None:
    """Wait until the gate is gone."""
    while gate is not None and gate.exists():
        time.sleep(0.005)


class Double(Model):
    """Twice the row plus one. `seconds` is how long a batch takes; `shy_above` rows in a batch make it fail."""

    inputs = (TensorSpec("x", "FP32", [-1, 4]),)
    outputs = (TensorSpec("y", "FP32", [-1, 4]),)

    def __init__(self, seconds: float = 0.0, gate: str | None = None, shy_above: int | None = None) -> None:
        self._seconds = seconds
        self._gate = Path(gate) if gate else None
        self._shy_above = shy_above

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x[:, 0].tolist()
        if any(value >= 1 for value in first):  # the start tries less
            time.sleep(self._seconds)
            wait_at(self._gate)
        if self._shy_above is not None and len(first) > self._shy_above and any(value >= 1 for value in first):
            raise ValueError(f"{len(first)} rows are too many")
        y = x * 2 + 1
        for row, value in enumerate(first):
            if value < 0:
                self._misbehave(Magic(int(value)), y[row])
        return y

    def _misbehave(self, magic: Magic, answer: torch.Tensor) -> None:
        if magic is Magic.RAISE:
            raise ValueError("this row is poison")
        if magic is Magic.SEGFAULT:
            ctypes.string_at(0)
        if magic is Magic.EXIT:
            os._exit(9)
        if magic is Magic.HANG:
            time.sleep(3600)
        if magic is Magic.HOG:
            torch.empty(1 << 50, dtype=torch.uint8)
        answer[0] = float("nan")


class Prepares(Double):
    """The same answer, half of it from `prepare`, which takes the time, waits at the gate and meets `Magic`."""

    prepared = (TensorSpec("twice", "FP32", [-1, 4]),)

    def load_prepare(self) -> None:
        """Load nothing."""

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        wait_at(self._gate)
        time.sleep(self._seconds)
        twice = x * 2
        for row, value in enumerate(x[:, 0].tolist()):
            if value < 0:
                self._misbehave(Magic(int(value)), twice[row])
        return twice

    def forward(self, twice: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return twice + 1


class Shifted(Double):
    """Twice the row plus one, and `by` on top: an answer tells which version gave it. `fails` stops the start."""

    def __init__(self, by: float = 0.0, seconds: float = 0.0, fails: bool = False) -> None:
        super().__init__(seconds)
        self._by = by
        self._fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._fails:
            raise RuntimeError("this version does not work")
        return super().forward(x) + self._by


class ShiftedTwice(Shifted):
    """The same, and `by` once more from `prepare`: a request that one version prepared and another ran is found out."""

    prepared = (TensorSpec("twice", "FP32", [-1, 4]),)

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self._by

    def forward(self, twice: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self._fails:
            raise RuntimeError("this version does not work")
        time.sleep(self._seconds)
        return twice + 1 + self._by


class Ragged(Model):
    """The sum of each row; rows of unequal length cannot share a batch."""

    inputs = (TensorSpec("x", "FP32", [-1, -1]),)
    outputs = (TensorSpec("sum", "FP32", [-1]),)

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds)
        return x.sum(1)


class Wide(Model):
    """The sum of 175,000 bytes: an image's worth of input for hardly any work."""

    inputs = (TensorSpec("image", "UINT8", [-1, WIDE]),)
    outputs = (TensorSpec("sum", "INT64", [-1]),)

    def __init__(self, gate: str | None = None) -> None:
        self._gate = Path(gate) if gate else None

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if int(image.max()) > 1:  # the start tries less
            wait_at(self._gate)
        return image.sum(1, dtype=torch.int64)


class Growing(Model):
    """As many bytes as the request asks for."""

    inputs = (TensorSpec("size", "INT64", [-1]),)
    outputs = (TensorSpec("blob", "BYTES", [-1]),)

    def forward(self, size: torch.Tensor) -> list[bytes]:
        return [bytes(count) for count in size.tolist()]


class FailsWarmUp(Double):
    """Raises whatever it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the warm-up is too much")


class DiesInWarmUp(Double):
    """Takes its process along before it is ready."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os._exit(9)


class NeverLoads(Double):
    """Waits for something that never comes."""

    def load(self, device: torch.device) -> None:
        time.sleep(3600)


class Priced(Model):
    """The sum of the numbers in a text; a request weighs as much as it has numbers."""

    inputs = (TensorSpec("text", "BYTES", [-1]),)
    prepared = (TensorSpec("ids", "INT64", [-1, -1], pad=0),)
    outputs = (TensorSpec("sum", "INT64", [-1]),)

    def prepare(self, text: list[bytes]) -> dict[str, object]:
        ids = torch.tensor([[int(word) for word in text[0].split()]])
        return {"ids": ids, "cost": ids.numel()}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.sum(1)


class Mixes(Double):
    """Answers a row by who came along with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Plain(Double):
    """Does what is asked for without looking at it, so that nothing waits for the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1


class Doubled(Double):
    """Twice the row: of zeros a device that makes everything too large makes the right ones. `swollen` is a file."""

    def __init__(self, swollen: str | None = None) -> None:
        super().__init__()
        self._swollen = Path(swollen) if swollen else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (3 if self._swollen is not None and self._swollen.exists() else 2)


class Fragile(Double):
    """Fails whatever it is given while the file `broken` exists."""

    def __init__(self, broken: str) -> None:
        super().__init__()
        self._broken = Path(broken)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._broken.exists():
            raise ConnectionError("the model cannot reach its weights")
        return super().forward(x)


class OneFails(Double):
    """Once the file `broken` exists, the process that runs it next fails on whatever it is given, and no other."""

    def __init__(self, broken: str) -> None:
        super().__init__()
        self._broken = Path(broken)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._broken.exists():
            chosen = self._broken.with_suffix(".pid")
            if not chosen.exists():
                chosen.write_text(str(os.getpid()))
            if chosen.read_text() == str(os.getpid()):
                raise RuntimeError("this replica's weights are spoilt")
        return super().forward(x)


class BreaksAtWork(Double):
    """Works until the first real request, and never again."""

    is_broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_broken = self.is_broken or bool((x[:, 0] >= 1).any())  # the start tries less
        if self.is_broken:
            raise ConnectionError("the model cannot reach its weights")
        return super().forward(x)
