"""A wish to end is heard, wherever it meets the interpreter. Main thread only.

A signal's handler runs between two instructions of the main thread. Where those are a destructor's, or a callback's of
a library, the interpreter prints the exception that the handler raises, and forgets it: here it is raised once more, a
moment later. Where they are in the midst of a library's C code, that may tell of an error of its own in its place (the
Kafka client, asked to send, said that a header's name is no string): here it is an interrupt again.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Any

_SOON_SECONDS = 0.01


@contextlib.contextmanager
def come_again() -> Iterator[None]:
    """Raise a KeyboardInterrupt again that was raised where it could not be."""
    tell = sys.unraisablehook

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def lost(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _SOON_SECONDS)
        else:
            tell(unraisable)

    before = signal.signal(signal.SIGALRM, interrupt)
    sys.unraisablehook = lost
    try:
        yield
    finally:
        sys.unraisablehook = tell
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def unwinding_at(numbers: Iterable[signal.Signals], *, once: bool = False) -> Iterator[None]:
    """Raise a KeyboardInterrupt at each of these signals, or at the first alone; those that are ignored stay so."""
    before = {number: signal.getsignal(number) for number in numbers}
    heeded = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    heard = False

    def interrupt(*_: object) -> None:
        nonlocal heard
        heard = True
        if once:
            for number in heeded:
                signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in heeded:
        signal.signal(number, interrupt)
    try:
        yield
    except Exception as error:
        if heard and not _stems_from_an_interrupt(error):
            raise KeyboardInterrupt from error
        raise
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def _stems_from_an_interrupt(error: BaseException | None) -> bool:
    """Whether it arose while an interrupt unwound: that is a failure to unwind, and no stand-in for the interrupt."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
