"""How the demo looks to a person: a line per result and a panel at the end, at a terminal or in a file.

`demo_json` shows the same to a program.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from rich.cells import set_cell_size
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from forebay import __version__
from forebay.broker import KAFKA_VERSION, Broker
from forebay.cli.demo_examples import Example
from forebay.cli.demo_report import Arrival, Latency, Summary
from forebay.cli.reasons import in_words
from forebay.wording import counted

Act = Literal["alone", "together"]

KINDS: Mapping[str, str] = {
    "configured": "your Kafka",
    "embedded": f"Apache Kafka {KAFKA_VERSION}, from its jars",
    "container": "Apache Kafka in a container",
    "mock": "librdkafka's mock cluster, a stand-in",
}
ACTS: Mapping[Act, str] = {
    "alone": "one at a time: each finds the worker idle and leaves at once",
    "together": "all at once: while a batch runs, the next one grows",
}
STAND_IN = (
    "This is not Apache Kafka: no real broker could be started here, so a mock cluster inside this process stands in "
    "for it. Install forebay[broker], or name a Kafka in FOREBAY_KAFKA__BOOTSTRAP_SERVERS, to see the real thing."
)
BAR_CELLS = 5
FIXED_CELLS = 31
"""What mark, score, batch and latency take of a line, with the gaps around them."""
MIN_WIDTH, WIDE, MAX_WIDTH = 80, 106, 112
"""Below `WIDE` a line leaves out what the input is and the bar, so that the answer is never squeezed."""


@dataclass(slots=True)
class Step:
    """Something slow that is under way; `result` says what came of it."""

    result: str = ""


class View(Protocol):
    """What the demo shows, in this order."""

    def opening(self) -> None: ...
    def step(self, doing: str) -> AbstractContextManager[Step]: ...
    def note(self, line: str) -> None: ...
    def describe(self, broker: Broker) -> str: ...
    def warn_of_stand_in(self) -> None: ...
    def act(self, act: Act, requests: int) -> None: ...
    def arrival(self, arrival: Arrival) -> None: ...
    def summary(self, summary: Summary) -> None: ...
    def log_of_worker(self, lines: str) -> None: ...


class ConsoleView:
    """For a person. Without a terminal: the same lines, no colours, nothing that moves."""

    def __init__(self, example: Example, console: Console | None = None) -> None:
        self._example = example
        self._console = console or Console(highlight=False, soft_wrap=True)
        if not self._console.is_terminal:
            self._console.width = MAX_WIDTH
        self._width = min(max(self._console.width, MIN_WIDTH), MAX_WIDTH)
        self._is_wide = self._width >= WIDE
        self._is_headed = False
        text = self._width - FIXED_CELLS - (BAR_CELLS + 1 if self._is_wide else 0)
        self._asked = text * 2 // 5 if self._is_wide else text * 3 // 5
        self._about = text * 8 // 25 if self._is_wide else 0
        self._answered = text - self._asked - self._about

    def opening(self) -> None:
        """Say what is about to happen."""
        self._console.print(f"[bold]forebay {__version__} demo[/bold]  {self._example.title}")

    @contextmanager
    def step(self, doing: str) -> Iterator[Step]:
        """Show that something is under way, and how long it took."""
        step, started = Step(), time.monotonic()
        if self._console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            with Progress(*columns, console=self._console, transient=True) as progress:
                progress.add_task(doing)
                yield step
        else:
            self._console.print(f"  … {doing}")
            yield step
        taken = time.monotonic() - started
        self._console.print(f"  [green]✓[/green] {step.result or doing} [dim]({taken:.1f} s)[/dim]")

    def note(self, line: str) -> None:
        """Pass on what a step says about itself."""
        self._console.print(Text(f"    {line}", style="dim"))

    def describe(self, broker: Broker) -> str:
        """Name the broker."""
        return f"{KINDS[broker.kind]}, on {broker.bootstrap_servers}"

    def warn_of_stand_in(self) -> None:
        """Say that the broker is not a real one."""
        self._box(Text(STAND_IN), "not a real Kafka", "bold yellow")

    def act(self, act: Act, requests: int) -> None:
        """Head a part of the results."""
        if not requests:
            return
        self._console.print(f"\n[bold]{counted(requests, 'request')}, {ACTS[act]}[/bold]")
        if not self._is_headed:
            self._is_headed = True
            self._console.print(Text(self._heads(), style="dim"))

    def _heads(self) -> str:
        """Return the heads of the columns."""
        asked, answered = self._example.columns
        head = f"  {_fitted(asked, self._asked)}"
        head += _fitted("what it is", self._about) if self._is_wide else ""
        head += f" {_fitted(answered, self._answered)}{'score':>6}"
        return head + (" " * (BAR_CELLS + 1) if self._is_wide else "") + f"{'batch':>10}{'latency':>11}"

    def arrival(self, arrival: Arrival) -> None:
        """Print a result in one line."""
        answer = arrival.answer
        line = Text("✓ " if arrival.is_right else "✗ ", style="green" if arrival.is_right else "red")
        line.append(_fitted(arrival.sample.name, self._asked - 1) + " ", style="default")
        if self._is_wide:
            line.append(_fitted(arrival.sample.about, self._about), style="dim default")
        line.append(" ")
        if answer is None:
            line.append(arrival.error or "no result")
        else:
            cells = round(max(0.0, min(1.0, answer.score)) * BAR_CELLS)
            line.append(_fitted(answer.label, self._answered), style="bold default")
            line.append(f"{answer.score:6.0%}", style="default")
            if self._is_wide:
                line.append(" " + "━" * cells, style="cyan")
                line.append("╌" * (BAR_CELLS - cells), style="dim default")
            line.append(f"{'batch ' + str(arrival.batch_size or '?'):>10}", style="default")
            line.append(f"{arrival.latency_ms:8.1f} ms", style="default")
        self._console.print(line)

    def summary(self, summary: Summary) -> None:
        """Print the numbers and the verdict."""
        grid = Table.grid(padding=(0, 3))
        for name, text in _lines(summary):
            grid.add_row(Text(name, style="dim"), text)
        verdict = "every request got its result" if summary.all_right else ", ".join(summary.troubles)
        style = "green" if summary.all_right else "red"
        self._console.print()
        self._box(grid, verdict, style)

    def log_of_worker(self, lines: str) -> None:
        """Print the end of the worker's log."""
        if lines:
            self._box(Text(lines, overflow="fold"), "the end of the worker's log", "red")

    def _box(self, content: RenderableType, title: str, style: str) -> None:
        panel = Panel(content, title=title, title_align="left", border_style=style, width=self._width)
        self._console.print(panel, soft_wrap=False)


def _lines(summary: Summary) -> Iterator[tuple[str, str]]:
    told = [f"{summary.requests} sent", counted(summary.results, "result"), counted(summary.errors, "error")]
    if summary.duplicates:
        told.append(counted(summary.duplicates, "duplicate"))
    yield "requests", ", ".join(told)
    yield (
        "answers",
        f"{summary.right} of {summary.results} right; of the unmodified inputs {summary.originals_right} of "
        f"{summary.originals}",
    )
    if summary.throughput is not None:
        yield "throughput", f"{summary.throughput:,.1f} requests/s when sent all at once"
    for name, latency in (("one at a time", summary.alone), ("all at once", summary.together)):
        if latency is not None:
            yield f"latency, {name}", _percentiles(latency)
    if summary.runs_in_steps:
        most = max(summary.batches, default=0)
        yield "rows at once", f"mean {summary.mean_batch_size:.1f} in the last steps of requests, at most {most}"
    else:
        sizes = ", ".join(f"{number} of size {size}" for size, number in summary.batches.items())
        yield "batches", f"mean size {summary.mean_batch_size:.1f}: {sizes}"
    cuts = ", ".join(f"{in_words(reason)} ({count})" for reason, count in sorted(summary.cuts.items()))
    yield "cut because", cuts or "the worker does not say"
    yield "broker", KINDS[summary.broker]


def _percentiles(latency: Latency) -> str:
    return f"p50 {latency.p50_ms:,.1f} ms, p99 {latency.p99_ms:,.1f} ms"


def _fitted(text: str, cells: int) -> str:
    return set_cell_size(text, cells) if len(text) <= cells else set_cell_size(text, cells - 1) + "…"
