"""The log's account of failed requests: now and then how many ended in which error, and why the first of them did.

On the loop's thread; never a line for each request, so that a caller who sends rubbish cannot fill a disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.logs import logger
from forebay.records import Outcome

_EVERY = 10.0
_LONGEST = 300
_log = logger("worker")


def account(outcomes: Mapping[str, int], seconds: float) -> dict[str, Any]:
    """Return the fields of the last line of a worker's log: what it answered in its life."""
    errors = {outcome: count for outcome, count in outcomes.items() if outcome != "ok"}
    answered, ok = sum(outcomes.values()), outcomes.get("ok", 0)
    return {"requests": answered, "ok": ok, "errors": errors, "seconds": round(seconds, 1)}


class Failures:
    """Counts the errors since the last line."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first = ""
        self._told_at = -_EVERY

    def note(self, outcome: Outcome) -> None:
        """Count an outcome that is an error."""
        assert outcome.failure is not None
        code = outcome.failure.code.value
        if not self._counts:
            self._first = f"{outcome.id}: {outcome.failure.message}"[:_LONGEST]
        self._counts[code] = self._counts.get(code, 0) + 1

    def tell(self, now: float, *, at_once: bool = False) -> None:
        """Write a line if something failed, and the last one was written some time ago."""
        if self._counts and (at_once or now - self._told_at >= _EVERY):
            self._told_at = now
            _log.warning("requests_failed", **self._counts, first=self._first)
            self._counts.clear()
