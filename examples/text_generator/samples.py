"""The Zen of Python, which comes with Python, and the beginnings of its lines. Nothing is downloaded or needed.

A sample is a beginning that belongs to one line alone, so a wrong line is a mix-up on the way, not the network's.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..sample import Answer, Sample, cycled

TITLE = "A small network writes lines of the Zen of Python to their end, letter by letter"
ASKED, ANSWERED = "beginning", "line"


def lines() -> list[str]:
    """Return the aphorisms, without their title."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints itself when it is imported
        import this
    return codecs.decode(this.s, "rot13").splitlines()[2:]


def samples(count: int | None = None) -> list[Sample]:
    """Return `count` requests of one row, or each beginning once; the originals are the shortest of each line."""
    every = [
        Sample(f"{beginning} …", line, {"beginning": [beginning.encode()]}, (line,), number == 0)
        for line in lines()
        for number, beginning in enumerate(_beginnings(line))
    ]
    return cycled(every, len(every) if count is None else count)


def reader() -> Callable[[Sample, Mapping[str, Any]], Answer]:
    """Return what reads the answer from a result's outputs."""

    def read(_: Sample, outputs: Mapping[str, Any]) -> Answer:
        [line] = outputs["line"]
        text = line.decode() if isinstance(line, bytes) else str(line)
        return Answer(text, float(np.ravel(outputs["probability"])[0]))

    return read


def _beginnings(line: str) -> list[str]:
    """Return the beginnings of whole words, without the line's end, that no other line has."""
    words = line.split(" ")
    found = [" ".join(words[:count]) for count in range(1, len(words))]
    return [one for one in found if sum(other.startswith(one) for other in lines()) == 1]


def _print_as_json_lines() -> None:
    for sample in samples():
        print(json.dumps({"beginning": [beginning.decode() for beginning in sample.inputs["beginning"]]}))


if __name__ == "__main__":
    _print_as_json_lines()
