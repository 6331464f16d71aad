"""A network that has the Zen of Python by heart: given the beginning of a line it writes the rest, letter by letter.

Runs in a replica. Lines end after 19 to 69 letters, so requests join and leave while others go on. It trains itself in
a few seconds from a fixed seed on the CPU, whatever the device: every worker that loads it holds the same network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from forebay import Model, TensorSpec

SEED, ROUNDS, WIDTH, LETTERS = 7, 120, 128, 128
PADDING, BEGINNING, END = 0, 1, 10
LONGEST = 120


class TextGenerator(Model):
    """Takes the beginning of a line, in ASCII. Its `probability` is that of the letter which was least certain."""

    inputs = (TensorSpec("beginning", "BYTES", [-1]),)
    outputs = (TensorSpec("line", "BYTES", [-1]), TensorSpec("probability", "FP32", [-1]))
    prepared = (TensorSpec("letters", "INT64", [-1, -1], pad=PADDING),)

    def load(self, device: torch.device) -> None:
        """Train."""
        from .samples import lines

        self.net = train(lines()).eval().to(device)

    def prepare(self, beginning: list[bytes]) -> torch.Tensor:
        """Turn one beginning per row into the numbers of its letters."""
        rows = [as_numbers(one) for one in beginning]
        longest = max(map(len, rows))
        return torch.tensor([row + [PADDING] * (longest - len(row)) for row in rows])

    def begin(self, letters: torch.Tensor) -> list[dict[str, Any]]:
        """Read the beginnings; a row's state is what it has read and written so far."""
        hidden = self.net.read(letters)
        last = (letters != PADDING).sum(-1) - 1
        return [
            {"hidden": row[end], "text": bytearray(numbers[1 : end + 1]), "probability": 1.0}
            for row, end, numbers in zip(hidden, last.tolist(), letters.tolist(), strict=True)
        ]

    def step(self, states: list[dict[str, Any]]) -> list[Mapping[str, Any] | None]:
        """Write one letter of each line."""
        hidden = torch.stack([state["hidden"] for state in states])
        certain, letters = self.net.next(hidden).float().softmax(-1).max(-1)
        hidden = self.net.read(letters[:, None], hidden)[:, 0]
        for state, row, letter, value in zip(states, hidden, letters.tolist(), certain.tolist(), strict=True):
            state["hidden"] = row
            state["probability"] = min(state["probability"], value)
            state["has_ended"] = letter == END or len(state["text"]) >= LONGEST
            if not state["has_ended"]:
                state["text"].append(letter)
        return [
            {"line": bytes(state["text"]), "probability": torch.tensor(state["probability"])}
            if state["has_ended"]
            else None
            for state in states
        ]

    def example(self) -> Mapping[str, Any]:
        """Return a beginning whose line is short."""
        return {"beginning": [b"Readability cou"]}


class Net(nn.Module):
    """Letters in, what comes next out; `hidden` is [rows, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LETTERS, 32)
        self.cell = nn.GRU(32, WIDTH, batch_first=True)
        self.next = nn.Linear(WIDTH, LETTERS)

    def read(self, letters: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Return what is known after each letter: [rows, letters, WIDTH]."""
        known, _ = self.cell(self.table(letters), None if hidden is None else hidden[None].contiguous())
        return torch.as_tensor(known)


def as_numbers(beginning: bytes) -> list[int]:
    """Return the numbers of its letters. Raises ValueError for what the network has no letter for."""
    if not beginning.isascii() or any(letter < 32 for letter in beginning):
        raise ValueError("beginning must be one line of ASCII")
    if len(beginning) > LONGEST:
        raise ValueError(f"beginning has {len(beginning)} letters, more than {LONGEST}")
    return [BEGINNING, *beginning]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core: for matrices as small as these more of them wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(lines: Sequence[str]) -> Net:
    """Learn lines by heart. Where several begin alike the network cannot know which one is meant."""
    rows = [[BEGINNING, *line.encode(), END] for line in lines]
    longest = max(map(len, rows))
    letters = torch.tensor([row + [PADDING] * (longest - len(row)) for row in rows])
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(SEED)
        net = Net()
        optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(ROUNDS):
            optimiser.zero_grad()
            said = net.next(net.read(letters[:, :-1])).transpose(1, 2)
            nn.functional.cross_entropy(said, letters[:, 1:], ignore_index=PADDING).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
    return net
