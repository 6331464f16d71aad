"""What `forebay check` finds, one value per question, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from forebay.errors import EXIT_CONFIG, EXIT_UNAVAILABLE
from forebay.wording import counted


class State(StrEnum):
    """How a question was answered; `skipped` means that an earlier failure left nothing to ask."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer. `fix` is what to do, or None; other ways to do it follow on lines of their own.

    `unavailable` marks a failure to reach Kafka.
    """

    question: str
    state: State
    told: str
    fix: str | None = None
    unavailable: bool = False


def ok(question: str, told: str) -> Finding:
    """Make a good answer."""
    return Finding(question, State.OK, told)


def warning(question: str, told: str, fix: str | None = None) -> Finding:
    """Make an answer that lets the worker start but deserves a look."""
    return Finding(question, State.WARNING, told, fix)


def failed(question: str, told: str, fix: str | None = None, *, unavailable: bool = False) -> Finding:
    """Make an answer with which the worker cannot start or cannot work."""
    return Finding(question, State.FAILED, told, fix, unavailable)


def skipped(question: str, why: str) -> Finding:
    """Make the answer to a question that could not be asked."""
    return Finding(question, State.SKIPPED, why)


def exit_code(findings: Iterable[Finding]) -> int:
    """Give the exit code: 78 for anything that must be mended here, 69 if Kafka alone is not reachable, else 0."""
    failures = [finding for finding in findings if finding.state is State.FAILED]
    if any(not finding.unavailable for finding in failures):
        return EXIT_CONFIG
    return EXIT_UNAVAILABLE if failures else 0


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Give the findings as plain values."""
    code = exit_code(findings)
    shown = [{key: value for key, value in asdict(one).items() if key != "unavailable"} for one in findings]
    return {"ok": code == 0, "exit_code": code, "findings": shown}


def print_findings(findings: Iterable[Finding], names: Iterable[str]) -> list[Finding]:
    """Print a line per answer as it comes, and what they come to; return them. `names` are what the lines may be about.

    Each failure has its fix below it, each way on a line of its own, ready to copy.
    """
    from rich.console import Console
    from rich.text import Text

    marks = {
        State.OK: ("✓", "green"),
        State.WARNING: ("!", "yellow"),
        State.FAILED: ("✗", "red"),
        State.SKIPPED: ("–", "dim"),
    }
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(name) for name in ("advertised addresses", *names))
    told_all = []
    for finding in findings:
        told_all.append(finding)
        mark, style = marks[finding.state]
        told = Text(finding.told, "dim" if finding.state is State.SKIPPED else "")
        console.print(Text.assemble((mark, style), " ", (finding.question.ljust(width), "bold"), "  ", told))
        for number, line in enumerate((finding.fix or "").splitlines()):
            console.print(Text(f"  {'or' if number else '→'} {line}", style))
    counts = {state: sum(1 for one in told_all if one.state is state) for state in State}
    warnings = counted(counts[State.WARNING], "warning")
    console.print(f"\n{counts[State.FAILED]} failed, {warnings}, {counts[State.OK]} ok")
    return told_all
