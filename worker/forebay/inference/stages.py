"""Says how far the start of a replica has come, to whoever listens: a large model is silent for a minute otherwise.

Runs in the replica, on the thread that loads it. Who listens is found by that thread, not handed down through all that
loading calls; without a listener nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from forebay.inference.messages import Stage

_listener: ContextVar[Callable[[Stage], None] | None] = ContextVar("forebay_stage_listener", default=None)


@contextmanager
def told_to(listener: Callable[[Stage], None]) -> Iterator[None]:
    """Let `reached` in the block tell `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def reached(stage: str, **fields: str | int | float) -> None:
    """Say that a stage begins."""
    listener = _listener.get()
    if listener is not None:
        listener(Stage(stage, fields))
