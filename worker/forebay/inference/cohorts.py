"""Rows that run in steps, the requests that they belong to, and who of them runs alone to find a guilty one.

Runs in the replica's thread. Pure: it calls no model. A call that fails may have spoilt the state of every row in it,
so all of them begin again; halves of them then run apart, each until it has passed the step at which the call failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forebay.inference.flights import Flight
from forebay.inference.groups import Inputs

_NEVER = 1 << 62


@dataclass(slots=True, eq=False)
class Work:
    """One message of the loop: its requests, and how many of them have no outcome yet."""

    flight: Flight
    members: list[Member] = field(default_factory=list)
    left: int = 0


@dataclass(slots=True, eq=False)
class Member:
    """One request, `index` in its batch. `has_ended` says that it has its outcome, or needs none."""

    work: Work
    index: int
    rows: list[Row] = field(default_factory=list)
    has_ended: bool = False
    ran_again: bool = False


@dataclass(slots=True, eq=False)
class Row:
    """One row: its inputs as they lie in the slot, its state while it runs, its outputs once it has ended."""

    member: Member
    inputs: Inputs
    state: Any = None
    outputs: list[Any] | None = None
    steps: int = 0
    had_company: bool = False

    def reset(self) -> None:
        """Go back to the beginning."""
        self.state, self.steps, self.had_company = None, 0, False

    @property
    def goes_on(self) -> bool:
        """Whether it is still to run."""
        return self.outputs is None and not self.member.has_ended


@dataclass(slots=True)
class Cohort:
    """Rows that run apart from all others, until each has taken more than `until` steps."""

    rows: list[Row]
    until: int


class Cohorts:
    """Who runs apart. `parked` are rows that wait with their states until all cohorts are through."""

    def __init__(self) -> None:
        self.parked: list[Row] = []
        self._waiting: list[Cohort] = []
        self._current: Cohort | None = None

    def __bool__(self) -> bool:
        return self._current is not None or bool(self._waiting)

    def split(self, failed: list[Row]) -> None:
        """Let the halves of rows that failed together run apart, the first one next."""
        until = max(row.steps for row in failed)
        if self._current is not None:
            until, self._current = max(until, self._current.until), None
        for row in failed:
            row.reset()
        self._waiting += [Cohort(half, until) for half in reversed(halves(failed))]

    def isolate(self, member: Member, running: list[Row]) -> None:
        """Let one request run alone from its beginning to its end; `running` waits."""
        self.parked += running
        for row in member.rows:
            row.outputs = None
            row.reset()
        if self._current is not None:
            others = [row for row in self._current.rows if row.member is not member and row.goes_on]
            self.parked = [row for row in self.parked if row not in others]
            for row in others:
                row.reset()
            self._waiting.append(Cohort(others, self._current.until))
            self._current = None
        self._waiting.append(Cohort(list(member.rows), _NEVER))

    def next(self, running: list[Row]) -> list[Row] | None:
        """Return the rows that have to begin now, None where those that run go on; `running` changes with it."""
        if self._current is not None:
            if any(row.steps <= self._current.until for row in running):
                return None
            self.parked += running
            running.clear()
            self._current = None
        while self._waiting:
            cohort = self._waiting.pop()
            rows = [row for row in cohort.rows if row.goes_on]
            if rows:
                self._current = cohort
                return rows
        running += self.parked
        self.parked = []
        return None

    def disband(self) -> list[Row]:
        """End all cohorts; return the rows that are in none that runs, to begin again."""
        rows = [*self.parked, *[row for cohort in self._waiting for row in cohort.rows]]
        self.parked, self._waiting, self._current = [], [], None
        return rows


def halves(rows: list[Row]) -> list[list[Row]]:
    """Return the rows of the first and of the second half of the requests."""
    members = list(dict.fromkeys(row.member for row in rows))
    first = set(members[: len(members) // 2])
    return [[row for row in rows if row.member in first], [row for row in rows if row.member not in first]]
