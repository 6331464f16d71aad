"""What an example offers to try it with: real inputs with their right answers, and the answer read from a result.

Runs in the process that sends requests, never in a replica. Knows neither Kafka nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. `inputs` maps input names to a numpy array or, for BYTES, a list of bytes.

    `right` holds every answer that counts as right. `original` marks an unmodified input: the demo sends it alone
    and insists on its answer.
    """

    name: str
    about: str
    inputs: Mapping[str, Any]
    right: tuple[str, ...]
    original: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a result says, in one word and one number."""

    label: str
    score: float


def cycled(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return `count` samples, the originals first; from the second round on nothing is an original."""
    ordered = sorted(samples, key=lambda sample: not sample.original)
    rounds = [ordered[number % len(ordered)] for number in range(count)]
    return [
        sample if number < len(ordered) else replace(sample, original=False) for number, sample in enumerate(rounds)
    ]
