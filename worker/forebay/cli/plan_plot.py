"""The picture of `forebay plan`: latency against load for each candidate, and below it how busy its replicas are.

The same traffic is replayed faster and slower. Imports matplotlib (extra `plot`), which draws into a file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.cli.plan_curve import Measured
from forebay.cli.plan_traffic import Traffic
from forebay.cli.planning import Candidate, Estimate, Planner
from forebay.errors import UsageError

STEPS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98)
"""Shares of what a candidate can answer at which it is simulated."""

MOST = 8
"""Lines that can still be told apart."""

_REPLAYED = 4_000
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#555555")
_STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True, slots=True)
class Line:
    """A candidate over the rates: requests per second, and what it does at each."""

    candidate: Candidate
    points: list[tuple[float, Estimate]]


def pyplot() -> Any:
    """Return matplotlib's pyplot, set to draw into files. Raises UsageError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'forebay[plot]', or leave --plot out") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as found

    return found


def lines(
    planner: Planner, traffic: Traffic, estimates: Sequence[Estimate], advance: Callable[[int], None]
) -> list[Line]:
    """Simulate each candidate over a range of loads."""
    drawn = []
    done = 0
    for estimate in estimates[:MOST]:
        points = []
        for step in STEPS:
            rate = step * estimate.capacity
            replayed = traffic.at_rate(rate, _REPLAYED)
            points.append((rate, planner.estimate(estimate.candidate, traffic, replayed)))
            done += 1
            advance(done)
        drawn.append(Line(estimate.candidate, points))
    return drawn


def draw(path: Path, drawn: Sequence[Line], traffic: Traffic, curve: Measured, advised: Candidate | None) -> None:
    """Write the picture."""
    plt = pyplot()
    figure, (latency, busy) = plt.subplots(
        2, 1, figsize=(9.5, 8), sharex=True, height_ratios=(2.2, 1), layout="constrained"
    )
    for number, line in enumerate(drawn):
        color, width = COLORS[number % len(COLORS)], 2.6 if line.candidate == advised else 1.6
        style = _STYLES[0] if line.candidate.batch.dispatch == "eager" else _STYLES[1]
        rates = [rate for rate, _ in line.points]
        name = str(line.candidate) + ("  ◀ advised" if line.candidate == advised else "")
        latency.plot(rates, [one.p99 * 1000 for _, one in line.points], style, color=color, lw=width, label=name)
        latency.plot(rates, [one.p50 * 1000 for _, one in line.points], style, color=color, lw=0.8, alpha=0.55)
        busy.plot(rates, [one.busy * 100 for _, one in line.points], style, color=color, lw=width)
    latency.set_yscale("log")
    latency.set_ylabel("latency, ms (bold p99, thin p50)")
    busy.set_ylabel("replicas busy, %")
    busy.set_ylim(0, 105)
    busy.set_xlabel("requests per second")
    for axis in (latency, busy):
        axis.axvline(traffic.rate, color="black", lw=1, ls=(0, (2, 2)))
        axis.grid(True, which="both", alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(left=0)
    plain = plt.FuncFormatter(lambda value, _: f"{value:,g}")
    latency.yaxis.set_major_formatter(plain)
    latency.yaxis.set_minor_formatter(
        plt.FuncFormatter(lambda value, _: plain(value) if f"{value:e}"[0] in "25" else "")
    )
    busy.xaxis.set_major_formatter(plain)
    latency.tick_params(which="minor", labelsize=8)
    latency.annotate(
        f" this traffic: {traffic.rate:,.0f}/s",
        (traffic.rate, 1),
        xycoords=("data", "axes fraction"),
        va="top",
        fontsize=9,
    )
    figure.legend(loc="outside lower center", ncols=min(len(drawn), 2), fontsize=8.5, frameon=False)
    latency.set_title(f"{curve.model} ({curve.source})\n{traffic.source}", fontsize=10, loc="left")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        plt.close(figure)
