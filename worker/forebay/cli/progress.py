"""Progress of long commands on standard error: shown on a terminal, silent elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Advance = Callable[[int], None]


@contextlib.contextmanager
def counting(word: str, total: int | None = None, *, quiet: bool = False) -> Iterator[Advance]:
    """Show a count with its rate while the block runs; the yielded function takes how many are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(word, total=total)
        yield lambda done: progress.update(task, completed=done)
