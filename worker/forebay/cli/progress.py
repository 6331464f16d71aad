"""Progress of long commands on standard error: a count on a terminal, a line where a first answer takes long.

Nothing of it is ever on standard output, which belongs to results.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Protocol

import typer

SOON_SECONDS = 0.6
"""A person at a terminal is told before they wonder; that nothing listens there is known, and said, by then."""

LATE_SECONDS = 1.0
"""A log or a pipe is spared a line that would be untrue a moment later."""


class Advance(Protocol):
    """Takes how many are done, and what is being done where that changes."""

    def __call__(self, done: int, word: str | None = None) -> None: ...


@contextlib.contextmanager
def counting(word: str, total: int | None = None, *, quiet: bool = False) -> Iterator[Advance]:
    """Show a count, and how much of what while that is known, as long as the block runs."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    of = "{task.completed:,.0f}" if total is None else "{task.completed:,.0f} of {task.total:,.0f}"
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *([] if total is None else [BarColumn()]))
    columns = (*columns, TextColumn(of), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(word, total=total)

        def advance(done: int, word: str | None = None) -> None:
            progress.update(task, completed=done, description=word)

        yield advance


def waiting_for_kafka(servers: str, seconds: float) -> contextlib.AbstractContextManager[threading.Timer]:
    """Do what `waiting_for` does, for Kafka's first answer."""
    return waiting_for(f"Kafka at {servers}", seconds)


@contextlib.contextmanager
def waiting_for(what: str, seconds: float) -> Iterator[threading.Timer]:
    """Say what is waited for, and how long at most, where the block has not ended in a moment."""
    line = f"waiting for {what}, {seconds:g} s at most"
    told = threading.Timer(SOON_SECONDS if sys.stderr.isatty() else LATE_SECONDS, typer.echo, (line,), {"err": True})
    told.daemon = True
    told.start()
    try:
        yield told
    finally:
        told.cancel()
