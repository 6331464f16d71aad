"""A model that runs in steps, for tests: a row counts to its number, and does what its mark says at its third step."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from forebay import Model, TensorSpec

FAILS, NOT_A_NUMBER, ENDLESS, NEVER_BEGINS, CRASHES, HANGS = -1, -2, -3, -4, -5, -6
MARKED_STEP = 3


class Counting(Model):
    """Counts from 0 to `n` and returns what it passed, and half of the last. Remembers how many rows each step had."""

    inputs = (TensorSpec("n", "INT64", [-1, 1]),)
    outputs = (TensorSpec("passed", "INT64", [-1, -1], pad=-1), TensorSpec("half", "FP32", [-1]))

    def __init__(self, room: int = 1 << 30, seconds: float = 0.0) -> None:
        self.room = room
        self.seconds = seconds
        self.is_broken = False
        self.begun: list[int] = []
        self.sizes: list[int] = []

    def begin(self, n: torch.Tensor) -> list[list[int]]:
        numbers = [int(value) for value in n[:, 0]]
        if NEVER_BEGINS in numbers:
            raise ValueError("a row does not begin")
        self.begun.append(len(numbers))
        return [[number, 0] for number in numbers]

    def step(self, states: list[list[int]]) -> list[Any]:
        self.sizes.append(len(states))
        time.sleep(self.seconds)
        if self.is_broken:
            raise ConnectionError("the model is broken")
        if sum(1 if number < 100 else 2 for number, _ in states) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        for state in states:
            state[1] += 1  # before anything fails: what fails has spoilt the states of the others
            self._do(*state)
        return [self._end(*state) for state in states]

    def _do(self, mark: int, steps: int) -> None:
        if steps != MARKED_STEP:
            return
        if mark == FAILS:
            raise ValueError("a row fails in its third step")
        if mark == CRASHES:
            os._exit(9)
        if mark == HANGS:
            time.sleep(60)

    def _end(self, number: int, steps: int) -> Any:
        if number == ENDLESS or steps < (MARKED_STEP if number < 0 else number):
            return None
        half = float("nan") if number == NOT_A_NUMBER else steps / 2
        return {"passed": torch.arange(steps), "half": torch.tensor(half)}

    def example(self) -> dict[str, Any]:
        return {"n": torch.tensor([[2], [3]])}


class Hoarding(Counting):
    """Keeps 4 kB more on its device with each step of a row."""

    def begin(self, n: torch.Tensor) -> list[Any]:
        return [(state, [torch.zeros(0, device=n.device)]) for state in super().begin(n)]

    def step(self, states: list[Any]) -> list[Any]:
        for _, held in states:
            held[0] = torch.cat([held[0], torch.ones(1_000, device=held[0].device)])
        return super().step([state for state, _ in states])
