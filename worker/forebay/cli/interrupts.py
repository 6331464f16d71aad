"""A wish to end that nobody heard comes again.

A signal's handler runs between two instructions of the main thread. Where those are a destructor's, or a callback's of
a library, the interpreter prints the exception that the handler raises, and forgets it. Here it is raised once more, a
moment later. Main thread only.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
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
