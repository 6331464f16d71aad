"""How `forebay optimize` shows what it measured: a table, the settings to paste, and the same as JSON. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.inference.messages import Tried

_WIDE = 120
NOT_HERE, _FAILS = "not here", "fails"


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
    """Print the table, what it says, and the lines to paste. What the machine has not is one line for each reason."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    title = f"{escape(found.model)} on {escape(found.device)}: batches of {found.baseline.full_rows} rows"
    table = Table(title=f"{title}, {found.most:g} deviation allowed", title_justify="left", box=None, pad_edge=False)
    table.add_column("candidate", no_wrap=True)
    for name in ("batch, ms", "row, ms", "speed", "deviation"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for one in found.tried:
        if not one.verdict.startswith(NOT_HERE):
            table.add_row(*_cells(one, found), style="bold green" if one is found.adopted else None)
    console.print(table)
    for line in (*_reasons(found.tried, NOT_HERE), *_reasons(found.tried, _FAILS)):
        console.print(line, highlight=False, markup=False, style="dim")
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if found.written:
        console.print(f"written: {found.written}; set model.weights to it", highlight=False, markup=False)
    if found.settings:
        console.print(f"\n{found.settings}", highlight=False, markup=False, end="")
    else:
        console.print(f"\nnothing to set: no candidate ran and deviates at most {found.most:g}", highlight=False)


def _cells(one: Tried, found: Comparison) -> list[str]:
    ran, speed = one.full_seconds > 0, _speedup(one, found.baseline)
    verdict = _FAILS if one.verdict.startswith(_FAILS) else one.verdict.removesuffix(f" more than {found.most:g}")
    return [
        _label(one),
        f"{one.full_seconds * 1000:.3f}" if ran else "–",
        f"{one.one_seconds * 1000:.3f}" if ran else "–",
        f"{speed:.2f}×" if speed else "–",
        f"{one.deviation:.2g}" if ran else "–",
        verdict,
    ]


def _label(one: Tried) -> str:
    return " ".join(
        part for part in (one.precision, one.compile if one.compile != "none" else "", one.sparsity) if part
    )


def _reasons(tried: Sequence[Tried], kind: str) -> Iterator[str]:
    """Yield a line for each reason of a kind: for a precision or a compilation where it concerns nothing else."""
    groups: dict[str, list[Tried]] = {}
    for one in tried:
        if one.verdict.startswith(kind):
            groups.setdefault(one.verdict.removeprefix(kind).removeprefix(": "), []).append(one)
    for reason, some in groups.items():
        precisions, compilers = ({getattr(one, name) for one in some} for name in ("precision", "compile"))
        if len(some) > 1 and len(precisions) == 1:
            names = some[0].precision
        elif len(some) > 1 and len(compilers) == 1 and compilers != {"none"}:
            names = some[0].compile
        else:
            names = ", ".join(map(_label, some))
        yield f"{kind}: {names}: {reason}"


def _ms(seconds: float) -> float | None:
    return round(seconds * 1000, 4) if seconds else None


def _speedup(one: Tried, baseline: Tried) -> float | None:
    return round(baseline.full_seconds / one.full_seconds, 3) if one.full_seconds and baseline.full_seconds else None
