"""The log's account of what keeps a worker from being ready: who has only the log learns it there, and when it is over.

On the loop's thread, twice a second; a line when a reason is new or another one, and once a minute while it lasts.
"""

from __future__ import annotations

from forebay.health import Health
from forebay.logs import logger

_ANOTHER_AFTER = 10.0
"""Seconds until a reason that says something else by now is told again: some sentences have numbers in them."""

_SAME_AFTER = 60.0
_log = logger("worker")


class Hindrances:
    """Watches the reasons of one worker's /readyz."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._told: dict[str, tuple[float, str]] = {}
        self._since: float | None = None
        self._is_told = False

    def look(self, now: float) -> None:
        """Tell what is new. A worker that starts or ends says so elsewhere."""
        found = self._health.ready() if self._health.phase in ("serving", "draining") else {}
        found.pop("phase", None)
        if not found:
            if self._is_told and self._since is not None:
                _log.info("ready_again", after_seconds=round(now - self._since, 1))
            self._since, self._is_told = None, False
            return
        self._since = now if self._since is None else self._since
        news = {name: why for name, why in found.items() if self._is_new(name, why, now)}
        if news:
            self._told |= {name: (now, why) for name, why in news.items()}
            self._is_told = True
            _log.warning("not_ready", **news)

    def _is_new(self, name: str, why: str, now: float) -> bool:
        told_at, told = self._told.get(name, (-_SAME_AFTER, why))
        return now - told_at >= (_SAME_AFTER if why == told else _ANOTHER_AFTER)
