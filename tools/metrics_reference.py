"""Writes docs/reference/metrics.md from the metrics that the worker declares: `python tools/metrics_reference.py`."""

from __future__ import annotations

from pathlib import Path

from forebay.metrics import Metrics, SupervisorMetrics

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "metrics.md"


def render() -> str:
    """Return the page."""
    lines = [
        "# Metrics",
        "",
        "On `/metrics` of the worker's HTTP port, for Prometheus. Durations are seconds, sizes bytes. Beside these",
        "there are the usual `process_…` metrics of the parent process. With `--devices` there is one port for all",
        "workers, and every metric of a worker has one label more, `device`. Written by `make reference`.",
        "",
        "| metric | kind | labels | what it counts |",
        "|---|---|---|---|",
    ]
    for name, kind, labels, documentation in sorted([*Metrics().declared(), *SupervisorMetrics().declared()]):
        shown = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{name}` | {kind} | {shown} | {documentation} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
