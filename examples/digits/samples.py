"""scikit-learn's 1,797 handwritten digits with their true labels. Nothing is downloaded, torch is not needed.

Every fifth one is held out of the training. `samples` gives those that the network learned, which it reads without
a mistake: a wrong label in a test is then a mix-up on the way, not the network's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..sample import Answer, Sample, cycled

TITLE = "A small network reads handwritten digits"
ASKED, ANSWERED = "handwriting", "digit"

Digits = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def learned() -> Digits:
    """Return pixels [n, 64] and digits [n] that the network is trained on."""
    pixels, digits = _every()
    return pixels[~_held_out(digits)], digits[~_held_out(digits)]


def held_out() -> Digits:
    """Return pixels [n, 64] and digits [n] that the network never saw."""
    pixels, digits = _every()
    return pixels[_held_out(digits)], digits[_held_out(digits)]


def samples(count: int | None = None) -> list[Sample]:
    """Return `count` requests of one row (100 by default); the originals are one of each digit."""
    pixels, digits = learned()
    firsts = {int(np.argmax(digits == digit)) for digit in range(10)}
    order = sorted(range(len(digits)), key=lambda row: row not in firsts)
    wanted = 100 if count is None else count
    every = [_sample(row, pixels[row], digits[row], row in firsts) for row in order[: max(wanted, 1)]]
    return cycled(every, wanted)


def reader() -> Callable[[Sample, Mapping[str, Any]], Answer]:
    """Return what reads the answer from a result's outputs."""

    def read(_: Sample, outputs: Mapping[str, Any]) -> Answer:
        digit = int(np.ravel(outputs["digit"])[0])
        return Answer(str(digit), float(np.ravel(outputs["probabilities"])[digit]))

    return read


def _sample(row: int, pixels: npt.NDArray[np.float32], digit: np.int64, original: bool) -> Sample:
    return Sample(f"scan {row + 1} of a {digit}", f"a {digit}", {"pixels": pixels[None]}, (str(digit),), original)


def _every() -> Digits:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.data.astype(np.float32), bunch.target.astype(np.int64)


def _held_out(digits: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    held_out: npt.NDArray[np.bool_] = np.arange(len(digits)) % 5 == 0
    return held_out


def _print_as_json_lines() -> None:
    for sample in samples():
        print(json.dumps({name: values.tolist() for name, values in sample.inputs.items()}))


if __name__ == "__main__":
    _print_as_json_lines()
