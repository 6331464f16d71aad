"""Models that misbehave on demand: a row whose first number is one of the marks below does what the mark says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forebay import Model, TensorSpec
from tests.unit.marks import CRASH, INFINITE, NOT_A_NUMBER, POISON


class Sums(Model):
    """The sum of four numbers, row by row; counts its calls and remembers their sizes."""

    inputs = (TensorSpec("x", "FP32", [-1, 4]),)
    outputs = (TensorSpec("y", "FP32", [-1]),)
    calls: list[int]

    def load(self, device: torch.device) -> None:
        self.calls = []

    def forward(self, x: torch.Tensor) -> Any:
        self.calls.append(len(x))
        first = x[:, 0]
        if bool((first == POISON).any()):
            raise ValueError("a row of this batch is poison")
        if bool((first == CRASH).any()):
            raise torch.AcceleratorError("device-side assert")  # type: ignore[attr-defined]
        y = x.sum(1)
        y[first == NOT_A_NUMBER] = float("nan")
        y[first == INFINITE] = float("inf")
        return y


class Fragile(Sums):
    """Fails on whatever it is given, or answers with NaN, while a file says so."""

    def __init__(self, broken: str) -> None:
        self.broken = Path(broken)

    def forward(self, x: torch.Tensor) -> Any:
        if self.broken.exists():
            if self.broken.read_text() == "nan":
                return x.sum(1) * float("nan")
            raise ConnectionError("the feature store does not answer")
        return super().forward(x)


class Remembers(Sums):
    """Has an example that can be had once at the start, and writes into whatever it is given."""

    asked = 0

    def example(self) -> dict[str, Any] | None:
        self.asked += 1
        if self.asked > 10:
            raise FileNotFoundError("the example's file was removed")
        return {"x": torch.full((1, 4), 1e30)}

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        x.mul_(1e30)
        return y


class InPlace(Sums):
    """Writes into its input before it fails, as many a preprocessing does."""

    def forward(self, x: torch.Tensor) -> Any:
        marks = x[:, 0].clone()
        x.mul_(10)
        if bool((marks == POISON).any()):
            raise ValueError("poison")
        y = x.sum(1)
        y[marks == NOT_A_NUMBER] = float("nan")
        return y


class Greedy(Sums):
    """Runs out of memory above `rows` rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def forward(self, x: torch.Tensor) -> Any:
        self.calls.append(len(x))
        if len(x) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x.sum(1)


class Words(Model):
    """Joins text with numbers; two outputs, one of them text."""

    inputs = (TensorSpec("text", "BYTES", [-1]), TensorSpec("n", "INT64", [-1]))
    outputs = (TensorSpec("said", "BYTES", [-1]), TensorSpec("twice", "INT64", [-1]))

    def forward(self, text: list[bytes], n: torch.Tensor) -> Any:
        if b"poison" in text:
            raise ValueError("poison")
        said = [word * int(times) for word, times in zip(text, n, strict=True)]
        return {"twice": n * 2, "said": said}


class Padded(Model):
    """Returns each row as it came, padded with -1 to the longest, and its own length."""

    inputs = (TensorSpec("ids", "INT64", [-1, -1], pad=-1),)
    outputs = (TensorSpec("same", "INT64", [-1, -1]), TensorSpec("length", "INT64", [-1]))

    def forward(self, ids: torch.Tensor) -> Any:
        return {"same": ids, "length": (ids >= 0).sum(1)}


class Prepared(Model):
    """Splits text into numbers, one request at a time."""

    inputs = (TensorSpec("text", "BYTES", [-1]),)
    prepared = (TensorSpec("ids", "INT64", [-1, -1], pad=0),)
    outputs = (TensorSpec("sum", "INT64", [-1]),)

    def prepare(self, text: list[bytes]) -> Any:
        lists = [[int(word) for word in line.split()] for line in text]
        width = max(map(len, lists))
        return torch.tensor([numbers + [0] * (width - len(numbers)) for numbers in lists])

    def forward(self, ids: torch.Tensor) -> Any:
        return ids.sum(1)


class Echo(Model):
    """Returns whatever `answer` says, to try what the runner makes of it."""

    inputs = (TensorSpec("x", "FP32", [-1, 4]),)

    def __init__(self, answer: Any, *outputs: TensorSpec) -> None:
        self.answer = answer
        self.outputs = outputs or (TensorSpec("y", "FP32", [-1]),)  # type: ignore[misc]

    def forward(self, x: torch.Tensor) -> torch.Tensor | Mapping[str, torch.Tensor]:
        return self.answer(x)  # type: ignore[no-any-return]
