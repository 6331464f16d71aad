"""How `forebay plan` shows what it found: a table with the advice below it, or JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from forebay.cli.plan_curve import Measured
from forebay.cli.plan_traffic import Traffic
from forebay.cli.planning import Advice, Estimate
from forebay.cli.reasons import in_words
from forebay.wording import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    Cell = Callable[[Estimate], Text]

_FEW = 9
"""Columns that leave room for bars and wider gaps."""

_BAR = 6
_TIGHT = 0.9
"""Load from which a candidate keeps up only just: a little more traffic, or a slower minute, and it falls behind."""

FOOTNOTE = (
    "Latency is from the record's time to the end of its execution; Kafka's own way in and out comes on top. Load is "
    "the share of what it can answer that is asked of it. Each replica is taken to run as fast as one alone."
)


def print_plan(traffic: Traffic, curve: Measured, estimates: Sequence[Estimate], advice: Advice) -> None:
    """Print everything for a person."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    lead = Table.grid(padding=(0, 2, 0, 0))  # what is too long for a line goes on below itself
    lead.add_row(Text("traffic", "bold"), Text(_of_traffic(traffic)))
    lead.add_row("", Text(traffic.sparkline(48), "cyan"))
    lead.add_row(Text("curve", "bold"), Text(_of_curve(curve)))
    for note in [*traffic.notes, *curve.notes]:
        lead.add_row(Text("note", "bold yellow"), Text(note))
    console.print(lead)
    console.print()
    console.print(table(estimates, advice))
    console.print(Text(FOOTNOTE, "dim"))
    console.print()
    _print_advice(console, estimates, advice)


def _of_traffic(traffic: Traffic) -> str:
    rows = traffic.rows / len(traffic.arrivals)
    several = f", {rows:.1f} rows each" if rows > 1 else ""
    peak = f", {traffic.peak():,.0f} in the busiest second" if traffic.seconds > 2 else ""
    count = counted(len(traffic.arrivals), "request")
    return f"{traffic.source}: {count}{several}, {_per_second(traffic.rate)} on average{peak}"


def _per_second(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"


def _of_curve(curve: Measured) -> str:
    bucket = 0 if 0 in curve.known else max(curve.known)
    points = curve.known[bucket]
    step = max(1, math.ceil(len(points) / 5))
    chosen = sorted({*points[::step], points[-1]})
    told = " · ".join(f"{rows:,} → {seconds * 1000:.3g} ms" for rows, seconds in chosen)
    others = f" (bucket {bucket}, one of {len(curve.known)})" if len(curve.known) > 1 else ""
    return f"{curve.model}, {curve.source}{others}: rows {told}"


def table(estimates: Sequence[Estimate], advice: Advice) -> Table:
    """Draw a row per candidate, for a terminal of 80 columns; the advised one is marked."""
    from rich.table import Table

    columns = _columns(estimates, advice)
    drawn = Table(box=None, padding=(0, 2 if len(columns) <= _FEW else 1, 0, 0), header_style="dim")
    for heading, _ in columns:
        drawn.add_column(heading, justify="left" if heading in ("", "dispatch", "busy") else "right", no_wrap=True)
    for one in estimates:
        style = "bold" if one is advice.estimate else "" if one.keeps_up else "dim"
        drawn.add_row(*[cell(one) for _, cell in columns], style=style)
    return drawn


def _columns(estimates: Sequence[Estimate], advice: Advice) -> list[tuple[str, Cell]]:
    """Choose the columns: those that differ between the candidates, and what there is to tell of them.

    One that falls behind has no latency to show: it grows as long as the traffic lasts.
    """
    from rich.text import Text

    best = min((one.p99 for one in estimates if one.keeps_up), default=None)
    columns: list[tuple[str, Cell]] = [
        ("", lambda one: Text("▶" if one is advice.estimate else " ", "bold green")),
        ("batch\nlimit", lambda one: Text(f"{one.candidate.batch.max_batch_size:,}")),
        ("dispatch", lambda one: Text(one.candidate.mode)),
    ]
    if len({one.candidate.replicas for one in estimates}) > 1:
        columns.append(("repli-\ncas", lambda one: Text(str(one.candidate.replicas))))
    if len({one.candidate.gpus for one in estimates}) > 1:
        columns.append(("GPUs", lambda one: Text(str(one.candidate.gpus))))
    extra: list[tuple[str, Cell]] = []
    if any(one.padding < 1 for one in estimates):
        extra.append(("not\npadding", lambda one: Text(f"{one.padding:.0%}")))
    if any(one.lost for one in estimates):
        extra.append(("lost", lambda one: Text(f"{one.lost:,}" if one.lost else "–")))
    bars = len(columns) + len(extra) < _FEW - 4
    return [
        *columns,
        ("p50\nms", lambda one: Text(milliseconds(one.p50) if one.keeps_up else "–")),
        ("p99\nms", lambda one: Text(milliseconds(one.p99) if one.keeps_up else "–", _p99_style(one, best))),
        ("mean\nbatch", lambda one: Text(f"{one.mean_batch:.1f}")),
        ("busy", lambda one: Text.assemble((f"{_bar(one.busy)} " if bars else "", "cyan"), f"{one.busy:4.0%}")),
        ("load", lambda one: Text(f"{one.load:.0%}", _load_style(one))),
        *extra,
        ("", _verdict),
    ]


def _p99_style(one: Estimate, best: float | None) -> str:
    return "bold green" if one.p99 == best else ""


def _verdict(one: Estimate) -> Text:
    from rich.text import Text

    if one.unanswered:
        return Text("leaves some", "red")
    if not one.keeps_up:
        return Text("falls behind", "red")
    if one.expired:
        return Text("some expire", "red")
    if one.lags_at_peaks:
        return Text("lags at peaks", "yellow")
    return Text("just keeps up", "yellow") if one.load > _TIGHT else Text("keeps up", "green")


def _load_style(one: Estimate) -> str:
    return "red" if not one.keeps_up else "yellow" if one.load > _TIGHT else "green"


def _bar(share: float) -> str:
    whole, eighths = divmod(round(min(max(share, 0.0), 1.0) * _BAR * 8), 8)
    return ("█" * whole + "·▏▎▍▌▋▊▉"[eighths]).ljust(_BAR, "·")[:_BAR]


def _print_advice(console: Console, estimates: Sequence[Estimate], advice: Advice) -> None:
    from rich.panel import Panel
    from rich.text import Text

    best = advice.estimate
    if best is None:
        console.print(Panel(Text(f"Nothing to set: {advice.reason}."), border_style="red", title="plan"))
        return
    lines = Text()
    for line in settings_of(best):
        lines.append(f"{line}\n", "bold green")
    lines.append(f"\n{advice.reason[0].upper()}{advice.reason[1:]}.")
    for line in (_batches(best), _against(best, estimates)):
        if line:
            lines.append(f"\n{line}")
    console.print(Panel(lines, border_style="green", title="plan: what to set", title_align="left", padding=(1, 2)))


def settings_of(best: Estimate) -> list[str]:
    """Say the advice in the words of the settings."""
    named = ", ".join(
        f"{key}: {value:g}" if isinstance(value, float) else f"{key}: {value}"
        for key, value in best.candidate.named().items()
    )
    lines = [f"batch: {{{named}}}"]
    if best.candidate.replicas > 1:
        lines.append(f"inference: {{replicas: {best.candidate.replicas}}}")
    if best.candidate.gpus > 1:
        lines.append(f"# {best.candidate.gpus} workers of one group, one per GPU")
    return lines


def _batches(best: Estimate) -> str:
    total = sum(best.cuts.values())
    frequent = [(reason, count / total) for reason, count in best.cuts.most_common(3) if count >= 0.01 * total]
    shares = ", ".join(f"{in_words(reason)} {share:.0%}" for reason, share in frequent)
    told = f"Batches of {best.mean_batch:.1f} rows on average, cut because: {shares}."
    if best.candidate.batch.dispatch == "eager" and best.busy > 0.5 and best.load < best.busy:
        told += (
            f" It is busy {best.busy:.0%} of the time since it runs small batches rather than wait; "
            f"it could answer {best.capacity:,.0f}/s."
        )
    return told


def _against(best: Estimate, estimates: Sequence[Estimate]) -> str:
    """Compare with the best of another dispatch mode, on as many replicas."""
    others = [
        one
        for one in estimates
        if one.keeps_up
        and one.candidate.batch.dispatch != best.candidate.batch.dispatch
        and one.candidate.servers == best.candidate.servers
    ]
    if not others:
        return ""
    other = min(others, key=lambda one: one.p99)
    return (
        f"Against it, {other.candidate}: p99 {milliseconds(other.p99)} ms in place of {milliseconds(best.p99)} ms, "
        f"busy {other.busy:.0%} in place of {best.busy:.0%}."
    )


def milliseconds(seconds: float) -> str:
    """Show seconds in milliseconds, with as many digits as matter."""
    value = seconds * 1000
    if value >= 100_000:
        return f"{seconds:,.0f} s"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def as_json(traffic: Traffic, curve: Measured, estimates: Sequence[Estimate], advice: Advice) -> dict[str, Any]:
    """Give everything as plain values."""
    return {
        "traffic": {
            "source": traffic.source,
            "requests": len(traffic.arrivals),
            "rows": traffic.rows,
            "seconds": round(traffic.seconds, 3),
            "rate": round(traffic.rate, 3),
            "peak": traffic.peak(),
            "notes": traffic.notes,
        },
        "curve": curve.as_document() | {"source": curve.source, "notes": curve.notes},
        "candidates": [_as_json(one) for one in estimates],
        "recommended": None
        if advice.estimate is None
        else {
            "batch": advice.estimate.candidate.named(),
            "inference": {"replicas": advice.estimate.candidate.replicas},
            "gpus": advice.estimate.candidate.gpus,
        },
        "reason": advice.reason,
    }


def _as_json(one: Estimate) -> dict[str, Any]:
    return one.candidate.named() | {
        "replicas": one.candidate.replicas,
        "gpus": one.candidate.gpus,
        "p50_ms": round(one.p50 * 1000, 3),
        "p99_ms": round(one.p99 * 1000, 3),
        "mean_ms": round(one.mean * 1000, 3),
        "mean_batch": round(one.mean_batch, 3),
        "busy": round(one.busy, 4),
        "load": round(one.load, 4),
        "requests_per_second": round(one.rate, 3),
        "capacity_per_second": round(one.capacity, 3),
        "keeps_up": one.keeps_up,
        "lags_at_peaks": one.lags_at_peaks,
        "expired": one.expired,
        "unanswered": one.unanswered,
        "padding_efficiency": round(one.padding, 4),
        "cuts": {str(reason): count for reason, count in one.cuts.most_common()},
    }
