"""Ctrl-C, wherever it meets the interpreter."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from forebay.cli.interrupts import come_again


class Destroyed:
    """Calls something in its destructor."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


def interrupt_itself() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def is_interrupted(*in_destructors: Callable[[], object]) -> bool:
    """Call these in destructors, and wait; return whether that was interrupted."""
    try:
        with come_again():
            for call in in_destructors:
                Destroyed(call)
            for _ in range(1_000):
                time.sleep(0.01)
    except KeyboardInterrupt:
        return True
    return False


@pytest.fixture(autouse=True)
def _pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_a_destructor_swallows_comes_again() -> None:
    assert is_interrupted(interrupt_itself)


def test_an_interrupt_that_is_swallowed_again_comes_once_more() -> None:
    assert is_interrupted(interrupt_itself, lambda: time.sleep(0.1))


def test_other_exceptions_of_destructors_are_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(str(unraisable.exc_value)))
    with come_again():
        Destroyed(lambda: [][0])
    assert told == ["list index out of range"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_nothing_is_left_behind() -> None:
    before = signal.getsignal(signal.SIGALRM), sys.unraisablehook
    with come_again():
        pass
    assert (signal.getsignal(signal.SIGALRM), sys.unraisablehook) == before
