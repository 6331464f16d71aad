"""`forebay top`: a live view of workers from their `/metrics`."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.options import AsJson, ConfigFile, SetValues, read_settings
from forebay.cli.reasons import in_words
from forebay.errors import KafkaUnavailableError, UsageError
from forebay.wording import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forebay.cli.scrape import Reading


HEADINGS = (
    "worker",
    "req/s",
    "err/s",
    "p50\nms",
    "p99\nms",
    "batch\nrows",
    "queued",
    "in\nflight",
    "lag",
    "ready",
    "memory\nMiB",
)
"""Two lines at most: a row of several workers must fit a terminal of 80 columns."""


LONG_NAME = 24


class UnreachableError(KafkaUnavailableError):
    """No worker answers at the given addresses."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(top)


def top(
    url: Annotated[
        list[str] | None, typer.Option("--url", "-u", help="A worker's address; repeatable.", show_default=False)
    ] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between readings.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view and leave.")] = False,
    json: AsJson = False,
    config: ConfigFile = None,
    values: SetValues = None,
) -> None:
    """Watch workers: those of --url, else the one of this configuration, at ops.host and ops.port.

    Requests answered and errors among them per second, latency from reading a request to its acknowledged outcome,
    rows per batch, requests queued and in flight, the group's lag in records, ready replicas, memory of worker and
    replicas; then why batches were cut.
    With --json one line per reading; --once leaves after the first.
    """
    import orjson
    from rich.console import Console
    from rich.live import Live

    urls = url or [_configured(config, values)]
    before = _read(urls)
    if all(reading.error for reading in before):
        told = "; ".join(f"{reading.url}: {reading.error}" for reading in before)
        mend = "give its ops.host:ops.port with --url, or its --config"
        raise UnreachableError(f"no worker answers: {told}; {mend}")
    if once or json:
        while True:
            before, views = _advance(before, interval)
            if json:
                typer.echo(orjson.dumps(views).decode())
            else:
                Console(highlight=False).print(render(views, title(urls, interval)))
            if once:
                return
    head = f"{title(urls, interval)}; Ctrl-C leaves"
    with Live(f"{head} (reading)", console=Console(highlight=False), screen=False, auto_refresh=False) as live:
        live.refresh()
        while True:
            before, views = _advance(before, interval)
            live.update(render(views, head), refresh=True)


def _configured(config: Path | None, values: list[str] | None) -> str:
    """Give the address of the worker of a configuration."""
    ops = read_settings(config, values).ops
    if ops.port == 0:
        raise UsageError(
            "ops.port is 0, so the worker has chosen one itself: its log tells ops_url; give it with --url"
        )
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(ops.host, ops.host)
    return f"[{host}]:{ops.port}" if ":" in host else f"{host}:{ops.port}"


def _read(urls: list[str]) -> list[Reading]:
    from concurrent.futures import ThreadPoolExecutor

    from forebay.cli.scrape import scrape

    with ThreadPoolExecutor(min(16, len(urls))) as pool:
        return list(pool.map(scrape, urls))


def _advance(before: list[Reading], interval: float) -> tuple[list[Reading], list[dict[str, Any]]]:
    from forebay.cli.scrape import overview

    time.sleep(interval)
    after = _read([reading.url for reading in before])
    return after, [overview(old, new) for old, new in zip(before, after, strict=True)]


def title(urls: list[str], interval: float) -> str:
    """Say what is shown."""
    which = urls[0] if len(urls) == 1 else counted(len(urls), "worker")
    return f"forebay top: {which}, over the last {interval:g} s"


def render(views: list[dict[str, Any]], head: str) -> RenderableType:
    """Draw a title, one row per worker, and below it why batches were cut and what went wrong."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0))
    several = len(views) > 1  # one alone is named by the title
    if several:
        table.add_column(HEADINGS[0], overflow="fold")  # where there is no room a name is folded, never a number
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    notes: list[Text] = []
    for view, name in zip(views, short_names([view["url"] for view in views]), strict=True):
        if view.get("error"):
            notes.append(Text(f"{view['url']}: {view['error']}", "red"))
            continue
        table.add_row(*_row(view, name)[0 if several else 1 :])
        notes += _notes(view, f"{name}: " if several else "")
    healthy = [view for view in views if not view.get("error")]
    if len(healthy) > 1:
        table.add_row(*_row(_sum(healthy), f"{len(healthy)} workers"), style="bold")
    return Group(Text(head, "dim"), table, *notes)


def short_names(urls: list[str]) -> list[str]:
    """Name workers by their addresses, without what long ones of a cluster have in common at their end."""
    names = [url.removeprefix("http://").rstrip("/") for url in urls]
    if len(names) < 2 or max(map(len, names)) <= LONG_NAME:
        return names
    parts = [re.split(r"(?=[.:])", name) for name in names]
    while len({tuple(part[-1:]) for part in parts}) == 1 and all(len(part) > 1 for part in parts):
        parts = [part[:-1] for part in parts]
    return ["".join(part) for part in parts]


def _row(view: dict[str, Any], name: str) -> list[str]:
    return [
        name,
        _compact(view["requests_per_second"]),
        _compact(view["errors_per_second"]),
        _shown(view["p50_ms"]),
        _shown(view["p99_ms"]),
        _shown(view["batch_size"]),
        _compact(view["queue_requests"]) + ("⏸" if view["paused"] else ""),
        _compact(view["in_flight"]),
        _compact(view["lag"]),
        f"{view['replicas_ready']:.0f}",
        _compact((view["resident_bytes"] + view["replica_memory_bytes"].get("resident", 0)) / 2**20),
    ]


def _sum(views: list[dict[str, Any]]) -> dict[str, Any]:
    """Add workers up; quantiles and means cannot be added, so the worst quantile and the mean of means are shown."""
    keys = (
        "requests_per_second",
        "errors_per_second",
        "queue_requests",
        "in_flight",
        "lag",
        "replicas_ready",
        "resident_bytes",
    )
    total: dict[str, Any] = {key: sum(view[key] for view in views) for key in keys}
    for key in ("p50_ms", "p99_ms"):
        total[key] = max((view[key] for view in views if view[key] is not None), default=None)
    sizes = [view["batch_size"] for view in views if view["batch_size"] is not None]
    resident = sum(view["replica_memory_bytes"].get("resident", 0) for view in views)
    return total | {
        "batch_size": sum(sizes) / len(sizes) if sizes else None,
        "paused": any(view["paused"] for view in views),
        "replica_memory_bytes": {"resident": resident},
    }


def _notes(view: dict[str, Any], prefix: str) -> list[Any]:
    from rich.text import Text

    notes = []
    if view["cuts"]:
        batches = sum(view["cuts"].values())
        shares = ", ".join(f"{in_words(reason)} {count / batches:.0%}" for reason, count in view["cuts"].items())
        notes.append(Text(f"{prefix}batches cut because: {shares}", "dim"))
    if view["steps_per_second"]:
        steps, rows = _compact(view["steps_per_second"]), _shown(view["batch_size"])
        notes.append(Text(f"{prefix}{steps} steps/s of {rows} rows", "dim"))
    errors = {name: count for name, count in view["outcomes"].items() if name != "ok"}
    if errors:
        notes.append(Text(prefix + "errors: " + ", ".join(f"{n} {c:.0f}" for n, c in errors.items()), "red"))
    if view["replica_restarts"]:
        notes.append(Text(f"{prefix}{counted(int(view['replica_restarts']), 'replica restart')} since start", "yellow"))
    return notes


def _shown(value: float | None) -> str:
    return "–" if value is None else _compact(value)


def _compact(value: float) -> str:
    """Show three or four digits: a row must fit a terminal of 80 columns."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 10 * size or (unit != "k" and value >= size):
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
