"""Failpoints: named places where a test lets the worker die, stop, sleep or fail; off unless FOREBAY_FAILPOINTS is set.

    FOREBAY_FAILPOINTS="before_commit=kill@3;after_produce=stop:2s@1;replica_before_run=error%0.1/42"

An entry is `place=action[:argument]`, then `@n` for the n-th time only, or `%probability/seed` for each time by chance;
with neither it is every time. Each process counts for itself. The places are passed once per batch, per commit or per
rebalance, never per record, and cost one look at a module's variable while nothing is armed. This module must never
know Kafka or a model: it runs on whatever thread passes a place.
"""

from __future__ import annotations

import difflib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from forebay.errors import ConfigError, ForebayError

VARIABLE = "FOREBAY_FAILPOINTS"
PLACES = (
    "after_receive",
    "after_submit",
    "before_produce",
    "after_produce",
    "before_commit",
    "after_commit",
    "before_transaction_offsets",
    "in_transaction",
    "before_transaction_commit",
    "after_transaction_commit",
    "during_revoke",
    "during_drain",
    "replica_before_run",
    "replica_after_run",
)
ACTIONS = ("kill", "stop", "sleep", "error")

_ENTRY = re.compile(
    r"(?P<place>\w+)=(?P<action>\w+)(:(?P<argument>[^@%]*))?(@(?P<nth>\d+)|%(?P<chance>[^/]+)(/(?P<seed>\d+))?)?"
)
_DURATION = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>ms|s)")


class FailpointError(ForebayError):
    """What the action `error` raises: the worker ends as if a part of it had failed."""


@dataclass(slots=True)
class Failpoint:
    """What happens at one place. `nth` 0 and `chance` 1 mean every time; `seconds` None that the test ends a stop."""

    place: str
    action: str
    argument: str = ""
    seconds: float | None = None
    nth: int = 0
    chance: float = 1.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    passed: int = 0

    def fire(self) -> None:
        """Count one passing, and act if it is the time."""
        self.passed += 1
        if self.nth and self.passed != self.nth:
            return
        if self.chance < 1.0 and self.dice.random() >= self.chance:
            return
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "sleep":
            time.sleep(self.seconds or 0.0)
        elif self.action == "stop":
            self._stop()
        else:
            raise FailpointError(self.argument or f"the failpoint {self.place} was told to fail")

    def _stop(self) -> None:
        """Freeze this process. A stopped process cannot wake itself, so with a time a child wakes it."""
        if self.seconds is not None:
            wake = f"sleep {self.seconds}; kill -CONT {os.getpid()}"
            subprocess.Popen(["/bin/sh", "-c", wake], stdin=subprocess.DEVNULL, start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)


_armed: dict[str, Failpoint] | None = None


def hit(place: str) -> None:
    """Pass a place: does nothing unless a failpoint is armed there."""
    if _armed is not None and (found := _armed.get(place)) is not None:
        found.fire()


def arm(entries: Iterable[Failpoint]) -> None:
    """Arm these failpoints and no others."""
    global _armed
    _armed = {entry.place: entry for entry in entries} or None


def arm_from_environment() -> list[str]:
    """Arm what FOREBAY_FAILPOINTS says; returns the places. Raises ConfigError for what is not known."""
    entries = parse(os.environ.get(VARIABLE, ""))
    arm(entries)
    return [entry.place for entry in entries]


def parse(text: str) -> list[Failpoint]:
    """Read entries separated by semicolons. Raises ConfigError with the known names."""
    entries = [_entry(part.strip()) for part in text.split(";") if part.strip()]
    twice = {entry.place for entry in entries if sum(other.place == entry.place for other in entries) > 1}
    if twice:
        raise ConfigError(f"{VARIABLE}: {min(twice)} is there twice; a place has one action")
    return entries


def _entry(text: str) -> Failpoint:
    found = _ENTRY.fullmatch(text)
    if found is None:
        raise ConfigError(f"{VARIABLE}: {text!r} must read place=action[:argument][@n or %probability/seed]")
    place, action, argument = found["place"], found["action"], found["argument"] or ""
    if place not in PLACES:
        raise ConfigError(f"{VARIABLE}: unknown place {_named(place, PLACES)}")
    if action not in ACTIONS:
        raise ConfigError(f"{VARIABLE}: unknown action {_named(action, ACTIONS)}")
    entry = Failpoint(place, action, argument, nth=int(found["nth"] or 0))
    if found["nth"] == "0":
        raise ConfigError(f"{VARIABLE}: {text!r} counts from @1")
    if found["chance"] is not None:
        entry.chance, entry.dice = _chance(text, found["chance"]), random.Random(int(found["seed"] or 0))
    if action in ("sleep", "stop") and (argument or action == "sleep"):
        entry.seconds = _seconds(text, argument)
    elif argument and action == "kill":
        raise ConfigError(f"{VARIABLE}: {text!r}: kill takes no argument")
    return entry


def _chance(text: str, number: str) -> float:
    try:
        chance = float(number)
    except ValueError:
        chance = -1.0
    if not 0.0 <= chance <= 1.0:
        raise ConfigError(f"{VARIABLE}: {text!r} needs a probability from 0 to 1 behind the percent sign")
    return chance


def _seconds(text: str, argument: str) -> float:
    found = _DURATION.fullmatch(argument)
    if found is None:
        raise ConfigError(f"{VARIABLE}: {text!r} needs a time such as 500ms or 2s behind the colon")
    return float(found["number"]) / (1000 if found["unit"] == "ms" else 1)


def _named(name: str, known: Iterable[str]) -> str:
    """Return a name with the one that was meant, and all that there are."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return f"{name!r}{meant}; known are {', '.join(names)}"
