"""A generator of characters for `bench/steps.py`: a recurrent net with made-up weights, one character per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from forebay import Model, TensorSpec

LETTERS, WIDTH = 64, 512


class Writer(Model):
    """Reads a prompt and writes as many characters as it is asked for; each step is one for all rows that run."""

    inputs = (TensorSpec("prompt", "INT64", [-1, -1], pad=0), TensorSpec("length", "INT64", [-1, 1]))
    outputs = (TensorSpec("text", "INT64", [-1, -1]),)

    def load(self, device: torch.device) -> None:
        with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.table = nn.Embedding(LETTERS, WIDTH).to(device)
            self.cell = nn.GRUCell(WIDTH, WIDTH).to(device)
            self.head = nn.Linear(WIDTH, LETTERS).to(device)

    def begin(self, prompt: torch.Tensor, length: torch.Tensor) -> list[dict[str, Any]]:
        hidden = torch.zeros(len(prompt), WIDTH, device=prompt.device, dtype=self.head.weight.dtype)
        for letter in prompt.T:  # padding leaves a row's state as it is
            hidden = torch.where((letter > 0)[:, None], self.cell(self.table(letter), hidden), hidden)
        return [
            {"hidden": row, "left": int(count), "text": []} for row, count in zip(hidden, length[:, 0], strict=True)
        ]

    def step(self, states: list[dict[str, Any]]) -> list[Any]:
        hidden = torch.stack([state["hidden"] for state in states])
        letters = self.head(hidden).argmax(-1)
        hidden = self.cell(self.table(letters), hidden)
        for state, row, letter in zip(states, hidden, letters.tolist(), strict=True):
            state["hidden"] = row
            state["left"] -= 1
            state["text"].append(letter)
        return [None if state["left"] > 0 else torch.tensor(state["text"]) for state in states]

    def example(self) -> Mapping[str, Any]:
        return {"prompt": torch.tensor([[5, 9, 2, 7]]), "length": torch.tensor([[4]])}
