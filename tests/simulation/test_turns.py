"""Models that share an accelerator, in made-up time: who runs when, and how the seconds are divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import pytest

from forebay.batching.batcher import Batcher
from forebay.batching.policy import Policy
from forebay.batching.sizes import Bounds
from forebay.breaker import Breakers
from forebay.dispatch import Dispatch
from forebay.inference.messages import Start
from forebay.inference.pool import Limits, Pool
from forebay.inference.replicas import Replica
from forebay.inference.staging import Staging
from forebay.observe import Observer
from forebay.turns import PATIENCE
from tests.unit.builders import request
from tests.unit.fakes import SIZE, FakeReplica

TICK = 0.0005


class Silent:
    """What dispatch tells the outside goes nowhere."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


@dataclass
class Runs:
    """A model: what a batch takes, and what the device did for it."""

    seconds: float
    fake: FakeReplica = field(default_factory=FakeReplica)
    began: float | None = None
    spent: float = 0.0
    batches: int = 0


class Accelerator:
    """A device that runs what it is given, and the dispatch of the models on it. `floods` always have a full queue."""

    def __init__(
        self,
        seconds: Mapping[str, float],
        shares: Mapping[str, float] | None = None,
        device: str = "cuda:0",
        policies: Mapping[str, Policy] | None = None,
    ) -> None:
        self.models = {name: Runs(took) for name, took in seconds.items()}
        start = ("1", "f", None, None, {}, "cpu", "fp32", None, 8, SIZE.total, SIZE.inputs, 2, [])
        replicas = [
            Replica(name, Start(name, *start), runs.fake, Staging(SIZE, 2)) for name, runs in self.models.items()
        ]
        self.pool = Pool(replicas, Limits(1e9, 60.0, 3, 5), count(1))
        self.pool.shares = dict(shares or {})
        self.now = 0.0
        self.pool.launch(self.now)
        for runs in self.models.values():
            runs.fake.get_ready(device=device)
        self.pool.collect(self.now)
        numbers = count(1)
        self.batchers = {
            name: Batcher(name, (policies or {}).get(name, Policy(Bounds(4, 10**6)))) for name in self.models
        }
        for batcher in self.batchers.values():
            batcher._numbers = numbers
        self.breakers = Breakers(enabled=True)
        self.dispatch = Dispatch(self.batchers, self.pool, cast(Observer, Silent()), self.breakers)
        self.floods: set[str] = set()
        self.waits: list[float] = []
        self.most = 0

    def ask(self, model: str) -> None:
        one = request(arrived=self.now)
        one.model = model
        self.batchers[model].add(one)

    def run(self, seconds: float, every: Mapping[str, float] | None = None) -> None:
        """Let time pass; `every` says how often a request comes for a model."""
        due = dict.fromkeys(every or (), self.now)
        end = self.now + seconds
        while self.now < end:
            for model in self.floods:
                while self.batchers[model].requests < 16:
                    self.ask(model)
            for model, at in due.items():
                if self.now >= at:
                    self.ask(model)
                    due[model] = at + (every or {})[model]
            self.dispatch.submit(self.now, draining=False)
            self.now += TICK
            self._compute()
            for back in self.pool.collect(self.now):
                self.waits += [self.now - one.arrived for one in back.batch.requests if back.batch.model in due]
                self.dispatch.learn(back, self.now)

    def _compute(self) -> None:
        """Let the device work on everything that it was given: several at once share it."""
        busy = [runs for runs in self.models.values() if runs.fake.jobs]
        self.most = max(self.most, len(busy))
        for runs in busy:
            runs.began = self.now - TICK if runs.began is None else runs.began
            runs.spent += TICK / len(busy)
            if self.now - runs.began >= runs.seconds * len(busy) - TICK / 2:
                runs.fake.finish(took=self.now - runs.began)
                runs.began, runs.batches = None, runs.batches + 1

    @property
    def spent(self) -> dict[str, float]:
        return {name: runs.spent for name, runs in self.models.items()}


def test_two_floods_have_the_same_time_whatever_their_batches_take() -> None:
    device = Accelerator({"slow": 0.04, "quick": 0.01})
    device.floods = {"slow", "quick"}
    device.run(8)
    assert abs(device.spent["slow"] - device.spent["quick"]) <= 0.05 + 2 * TICK
    assert device.models["quick"].batches >= 3.8 * device.models["slow"].batches
    assert device.most == 1


@pytest.mark.parametrize("share", [3.0, 0.25])
def test_a_share_weighs_the_time(share: float) -> None:
    device = Accelerator({"a": 0.02, "b": 0.03}, {"a": share})
    device.floods = {"a", "b"}
    device.run(12)
    assert abs(device.spent["a"] / share - device.spent["b"]) <= 0.02 / share + 0.03 + 2 * TICK
    assert device.most == 1


def test_a_trickle_waits_for_what_a_flood_has_begun_and_staged_and_no_longer() -> None:
    device = Accelerator({"flood": 0.04, "trickle": 0.002})
    device.floods = {"flood"}
    device.run(10, {"trickle": 0.09})
    assert len(device.waits) >= 100
    assert max(device.waits) <= 2 * 0.04 + 0.002 + 3 * TICK
    assert device.spent["flood"] >= 9.5


def test_a_flood_that_has_the_device_alone_is_staged_ahead_and_loses_nothing() -> None:
    device = Accelerator({"flood": 0.04, "idle": 0.04})
    device.floods = {"flood"}
    device.run(0.01)
    assert len(device.models["flood"].fake.jobs) == 2
    device.run(8)
    assert device.spent["flood"] >= 8.0


def test_who_was_idle_has_saved_nothing() -> None:
    device = Accelerator({"a": 0.02, "b": 0.02})
    device.floods = {"a"}
    device.run(6)
    device.floods = {"b"}
    device.run(3)
    before = device.spent
    device.floods = {"a", "b"}
    device.run(4)
    gained = {name: device.spent[name] - before[name] for name in before}
    assert abs(gained["a"] - gained["b"]) <= 0.08


def test_a_cpu_is_left_to_its_scheduler() -> None:
    device = Accelerator({"a": 0.02, "b": 0.02}, device="cpu")
    device.floods = {"a", "b"}
    device.run(1)
    assert device.most == 2
    assert [len(runs.fake.jobs) for runs in device.models.values()] == [2, 2]


def test_behind_a_batch_that_is_too_long_the_others_do_not_wait() -> None:
    device = Accelerator({"hangs": 1e9, "other": 0.01})
    device.ask("hangs")
    device.run(0.01)
    device.floods = {"other"}
    device.run(PATIENCE / 2)
    assert device.models["other"].batches == 0
    device.run(2)
    assert device.models["other"].batches > 50


def test_a_model_that_waits_for_a_fuller_batch_keeps_nobody_from_the_device() -> None:
    lingers = Policy(Bounds(4, 10**6), "linger", max_wait=5.0)
    device = Accelerator({"lingers": 0.01, "flood": 0.02}, policies={"lingers": lingers})
    device.ask("lingers")
    device.floods = {"flood"}
    device.run(2)
    assert device.spent["flood"] >= 1.95
    assert device.models["lingers"].batches == 0
    for _ in range(3):
        device.ask("lingers")
    device.run(0.1)
    assert device.models["lingers"].batches == 1


def test_a_broken_model_keeps_nobody_from_the_device() -> None:
    device = Accelerator({"broken": 0.01, "flood": 0.02})
    device.breakers.holds("broken", "its weights are gone", tells=True, now=0.0)
    device.ask("broken")
    device.floods = {"flood"}
    device.run(0.9)
    assert device.spent["flood"] >= 0.85


def test_three_models_share_and_nobody_is_forgotten() -> None:
    device = Accelerator({"a": 0.03, "b": 0.02, "c": 0.01}, {"a": 1.0, "b": 2.0, "c": 3.0})
    device.floods = {"a", "b", "c"}
    device.run(12)
    found = Counter({name: round(spent) for name, spent in device.spent.items()})
    assert found == {"a": 2, "b": 4, "c": 6}
