"""Turns: models whose replicas share an accelerator run one after the other, each for its share of the measured time.

Between the batchers and the pool, on the corridor's thread, for dispatch. The replicas of two models are two processes
whose kernels a device would mix as it likes, so that a batch would take longer than it is long, and nobody could say
what a model took. Here a model has an account: the seconds that its batches took, divided by its share. Whoever has the
lowest goes next; who was idle begins where the others are, so that nobody saves up. A CPU is left to its scheduler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from forebay.batching.batcher import Batcher
from forebay.breaker import Breakers
from forebay.inference.pool import Pool

PATIENCE = 0.1
"""Seconds that models wait for another one's batch; behind a longer one, or a hang, they run beside it."""

_CPU = "cpu"


class Turns:
    """Whose turn it is among the models of one worker. Costs nothing where no two of them share an accelerator."""

    def __init__(self, batchers: Mapping[str, Batcher], pool: Pool, breakers: Breakers) -> None:
        self._batchers = batchers
        self._pool = pool
        self._breakers = breakers
        self._accounts = dict.fromkeys(batchers, 0.0)
        self._active: set[str] = set()
        self._passed: set[str] = set()
        self._reached: dict[str, float] = defaultdict(float)
        self._devices = {model: next((one.device for one in pool.of(model)), _CPU) for model in batchers}
        self._rivals = {model: rivals for model in batchers if (rivals := self._rivals_of(model))}

    def _rivals_of(self, model: str) -> list[str]:
        device = self._devices[model]
        return [] if device == _CPU else [one for one, its in self._devices.items() if one != model and its == device]

    def order(self) -> list[str]:
        """Return the models in the order in which they are to be asked for a batch."""
        models = list(self._batchers)
        if not self._rivals:
            return models
        self._passed.clear()
        for model in self._rivals:
            if not (self._batchers[model].requests or self._is_busy(model)):
                self._active.discard(model)
            elif model not in self._active:
                self._active.add(model)
                self._accounts[model] = max(self._accounts[model], self._reached[self._devices[model]])
        return sorted(models, key=self._standing)

    def free_at(self, model: str, now: float) -> float | None:
        """Return when a model can begin another batch, as the pool says; None, too, where it is not its turn."""
        if model in self._rivals and self._is_anothers(model, now):
            return None
        return self._pool.free_at(model)

    def passes(self, model: str) -> None:
        """Note that a model had its turn and has no batch to run now."""
        self._passed.add(model)

    def began(self, model: str) -> None:
        """Note that a batch is about to be submitted."""
        if model in self._rivals:
            device = self._devices[model]
            self._reached[device] = max(self._reached[device], self._accounts[model])

    def took(self, model: str, seconds: float) -> None:
        """Charge a batch that came back."""
        if model in self._rivals:
            self._accounts[model] += seconds / self._pool.shares.get(model, 1.0)

    def _is_anothers(self, model: str, now: float) -> bool:
        standing = self._standing(model)
        for other in self._rivals[model]:
            since = [at for replica in self._pool.of(other) if (at := replica.busy_since) is not None]
            if since and now - min(since) < PATIENCE:
                return True
            if self._standing(other) < standing and self._wants(other, now):
                return True
        return False

    def _standing(self, model: str) -> float:
        """Return a model's account with what its replicas have now, as predicted."""
        running = sum(replica.expected for replica in self._pool.of(model))
        return self._accounts[model] + running / self._pool.shares.get(model, 1.0)

    def _is_busy(self, model: str) -> bool:
        return any(replica.running for replica in self._pool.of(model))

    def _wants(self, model: str, now: float) -> bool:
        """Whether a model would run a batch now."""
        batcher = self._batchers[model]
        if not batcher.requests or model in self._passed or not self._breakers.lets(model, now):
            return False
        due = batcher.next_due(0.0)
        return due is not None and due <= now and self._pool.free_at(model) is not None
