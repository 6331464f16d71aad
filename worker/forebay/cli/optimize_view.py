"""How `forebay optimize` shows what it measured: a table, the settings to paste, and the same as JSON. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.inference.messages import Tried

_WIDE = 120


@dataclass(slots=True)
class Comparison:
    """Everything that was measured of one model. `adopted` is the fastest that passed the gate."""

    model: str
    device: str
    most: float
    tried: Sequence[Tried]
    adopted: Tried | None = None
    notes: list[str] = field(default_factory=list)
    written: str = ""

    @property
    def baseline(self) -> Tried:
        """Uncompiled fp32, which everything is compared with."""
        return self.tried[0]

    @property
    def settings(self) -> str:
        """The lines to paste into the worker's YAML file."""
        if self.adopted is None:
            return ""
        return f"inference:\n  precision: {self.adopted.precision}\n  compile: {self.adopted.compile}\n"

    def as_document(self) -> dict[str, Any]:
        """Return the same for programs."""
        return {
            "model": self.model,
            "device": self.device,
            "max_deviation": self.most,
            "candidates": [
                {
                    "precision": one.precision,
                    "compile": one.compile,
                    "sparsity": one.sparsity or None,
                    "rows": one.full_rows,
                    "batch_ms": _ms(one.full_seconds),
                    "one_row_ms": _ms(one.one_seconds),
                    "speedup": _speedup(one, self.baseline),
                    "deviation": one.deviation if one.full_seconds and one.deviation < float("inf") else None,
                    "verdict": one.verdict,
                }
                for one in self.tried
            ],
            "adopted": {"precision": self.adopted.precision, "compile": self.adopted.compile} if self.adopted else None,
            "settings": self.settings,
            "notes": self.notes,
            "written": self.written or None,
        }


def show(found: Comparison) -> None:
    """Print the table, what it says, and the lines to paste."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    rows = found.baseline.full_rows
    table = Table(title=f"{found.model} on {found.device}", title_justify="left", box=None, pad_edge=False)
    for name in ("precision", "compile", "sparsity"):
        table.add_column(name, no_wrap=True)
    for name in (f"{rows} rows, ms", "1 row, ms", "speed", "deviation"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", min_width=18, overflow="fold")
    for one in found.tried:
        speed = _speedup(one, found.baseline)
        ran = one.full_seconds > 0
        table.add_row(
            one.precision,
            one.compile,
            one.sparsity or "–",
            f"{one.full_seconds * 1000:.3f}" if ran else "–",
            f"{one.one_seconds * 1000:.3f}" if ran else "–",
            f"{speed:.2f}×" if speed else "–",
            f"{one.deviation:.2g}" if ran else "–",
            one.verdict,
            style="bold green" if one is found.adopted else None if ran else "dim",
        )
    console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if found.written:
        console.print(f"written: {found.written}; set model.weights to it", highlight=False, markup=False)
    if found.settings:
        console.print(f"\n{found.settings}", highlight=False, markup=False, end="")


def _ms(seconds: float) -> float | None:
    return round(seconds * 1000, 4) if seconds else None


def _speedup(one: Tried, baseline: Tried) -> float | None:
    return round(baseline.full_seconds / one.full_seconds, 3) if one.full_seconds and baseline.full_seconds else None
