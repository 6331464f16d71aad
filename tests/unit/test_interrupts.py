"""Ctrl-C, wherever it meets the interpreter."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from forebay.cli.interrupts import come_again, unwinding_at


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


def tell_of_something_else() -> None:
    """Do as a library does whose C code was interrupted."""
    with contextlib.suppress(KeyboardInterrupt):
        interrupt_itself()
    raise TypeError("expected header key to be unicode string")


def test_an_interrupt_that_a_library_told_as_its_own_error_is_one_again() -> None:
    with pytest.raises(KeyboardInterrupt), unwinding_at([signal.SIGINT]):
        tell_of_something_else()


def test_an_error_without_an_interrupt_stays_one() -> None:
    with pytest.raises(IndexError), unwinding_at([signal.SIGINT]):
        [][0]


def test_what_fails_while_an_interrupt_unwinds_is_told() -> None:
    def fail_to_unwind() -> None:
        try:
            interrupt_itself()
        finally:
            [][0]

    with pytest.raises(IndexError), unwinding_at([signal.SIGINT]):
        fail_to_unwind()


def test_the_first_signal_alone_unwinds_where_the_unwinding_must_not_be_disturbed() -> None:
    unwound = []

    def unwind_undisturbed() -> None:
        try:
            interrupt_itself()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            interrupt_itself()
            unwound.append(True)

    with pytest.raises(KeyboardInterrupt), unwinding_at([signal.SIGINT, signal.SIGTERM], once=True):
        unwind_undisturbed()
    assert unwound
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with unwinding_at([signal.SIGINT]):
        interrupt_itself()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
