"""First numbers of a row that make `tests.models:Double` misbehave. No torch: tests that only send them need none."""

from __future__ import annotations

from enum import IntEnum


class Magic(IntEnum):
    """First numbers that make `Double` misbehave, once it is warm."""

    RAISE = -1
    SEGFAULT = -2
    EXIT = -3
    HANG = -4
    NAN = -5
    HOG = -6
