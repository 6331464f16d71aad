"""The breaker: a broken model must not drain the topic into the dead letters.

A replica in which every request of a batch has failed runs the model's warm-up example. If that fails, too, the model
is at fault and not the requests: the breaker opens, they wait again, unanswered, and one batch now and then tries.
Pure bookkeeping for the corridor, on its thread; it must never know a replica, a topic or a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds between two tries while a breaker is open: each is twice the one before."""

MOST_TRIES = 4
"""Tries of a broken model in a bounded run, over 15 seconds, before it gives up: it would never end."""

MEND = "nothing is answered or committed meanwhile; mend the model, its files or what it calls, or restart the worker"


@dataclass(slots=True)
class Change:
    """What a breaker did: it opened, is still open after a try, or closed. `why` is what the example met."""

    model: str
    state: str
    why: str
    tries: int


@dataclass(slots=True)
class _Open:
    """An open breaker."""

    again_at: float
    why: str
    pause: float = FIRST_PAUSE
    tries: int = 0


class Breakers:
    """The breakers of the served models. `enabled` False answers every failure as it comes.

    `beside` are those of the models' preparers, which are as hopeless.
    """

    def __init__(self, enabled: bool, beside: Breakers | None = None) -> None:
        self._enabled = enabled
        self._beside = beside
        self._open: dict[str, _Open] = {}
        self.changes: deque[Change] = deque()

    def __bool__(self) -> bool:
        """Whether one of them is open."""
        return bool(self._open)

    def is_open(self, model: str) -> bool:
        """Whether a model's requests wait for it to be mended."""
        return model in self._open

    def lets(self, model: str, now: float) -> bool:
        """Whether a batch of the model may run now."""
        return not self._open or (found := self._open.get(model)) is None or now >= found.again_at

    def began(self, model: str, now: float) -> None:
        """Note that a batch of the model runs; where its breaker is open it is the only one for a while."""
        if self._open and (found := self._open.get(model)) is not None:
            found.tries += 1
            found.pause = min(found.pause * 2, LONGEST_PAUSE)
            found.again_at = now + found.pause

    def retry(self, model: str) -> None:
        """Let a batch of the model run at once: it may have been mended."""
        if (found := self._open.get(model)) is not None:
            found.again_at, found.pause = float("-inf"), FIRST_PAUSE

    def hopeless(self) -> str | None:
        """Say which model a bounded run waits for in vain; None while there is hope, which costs nothing to ask."""
        for model, found in self._open.items():
            if found.tries >= MOST_TRIES:
                return (
                    f"model {model} fails its own warm-up example, too, after {found.tries} more tries ({found.why}); "
                    "nothing that waits for it was answered or committed: mend it and start again"
                )
        return self._beside.hopeless() if self._beside is not None else None

    def holds(self, model: str, unsound: str, *, tells: bool, now: float) -> bool:
        """Take in a batch that came back; True where its requests have to wait again.

        `unsound` is why the model fails its own example, empty if it does not. `tells` says that the batch ran to its
        end: one that only counts the deaths of its replicas says nothing about the model.
        """
        found = self._open.get(model)
        if unsound and self._enabled:
            if found is None:
                found = self._open[model] = _Open(now + FIRST_PAUSE, unsound)
                self.changes.append(Change(model, "opened", unsound, 0))
            else:
                found.again_at, found.why = max(found.again_at, now + found.pause), unsound
                if found.tries:  # else it ran already when the breaker opened
                    self.changes.append(Change(model, "still open", unsound, found.tries))
            return True
        if found is not None and tells:
            del self._open[model]
            self.changes.append(Change(model, "closed", "", found.tries))
        return False
