"""The breaker with a real model that breaks: nothing is answered until it is mended, then everything once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.records import Partition
from forebay.testing import ManualClock, MemoryBroker, make_worker, memory_settings
from tests.unit.marks import POISON
from tests.unit.test_breaker import value
from tests.unit.test_worker import ROOT, codes, memory_broker, publish


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return tmp_path / "broken"


def fragile(broken: Path, **more: Any) -> dict[str, Any]:
    model = {"model.factory": "tests.inference.models:Fragile", "model.options": {"broken": str(broken)}}
    return {**model, "batch.max_batch_size": 8, **more}


class Life:
    """A real worker with a real model, turn by turn."""

    def __init__(self, broker: MemoryBroker, values: dict[str, Any]) -> None:
        self.clock = ManualClock(step=0.001)
        self.worker, self.consumer, _ = make_worker(broker, memory_settings(values), ROOT, self.clock)
        self.worker._health._clock = self.clock
        assert self.worker._warm_up()
        self.worker._join()

    def turn(self, times: int, seconds: float = 0.02) -> None:
        for _ in range(times):
            self.clock.advance(seconds)
            self.worker._turn()


@pytest.mark.parametrize("how", ["", "nan"])
def test_a_model_that_breaks_waits_to_be_mended_and_then_answers_everything(broken: Path, how: str) -> None:
    broker = memory_broker()
    life = Life(broker, fragile(broken))
    for number in range(10):
        publish(broker, f"before-{number}")
    life.turn(20)
    assert set(codes(broker).values()) == {"ok"}

    broken.write_text(how)
    for number in range(50):
        publish(broker, f"after-{number}", number)
    life.turn(50, seconds=1)
    assert len(codes(broker)) == 10
    assert broker.records("dead") == []
    assert broker.committed[Partition("requests", 0)] == 10
    said = life.worker._health.ready()["breaker model"]
    assert ("NaN" if how else "the feature store does not answer") in said

    broken.unlink()
    life.turn(60, seconds=2)
    assert len(codes(broker)) == 60
    assert set(codes(broker).values()) == {"ok"}
    assert broker.records("dead") == []
    assert broker.committed[Partition("requests", 0)] == 60
    assert life.worker._health.ready() == {}


def test_a_topic_of_nothing_but_bad_requests_is_answered_with_errors(broken: Path) -> None:
    broker = memory_broker()
    life = Life(broker, fragile(broken))
    for number in range(100):
        publish(broker, str(number), POISON)
    life.turn(60)
    assert codes(broker) == {str(number): "model_error" for number in range(100)}
    assert len(broker.records("dead")) == 100
    assert broker.committed[Partition("requests", 0)] == 100
    assert life.worker._health.ready() == {}
    assert value(life.worker, "forebay_breaker_opened_total") is None


def test_an_example_that_cannot_be_had_any_more_or_was_written_into_blames_no_model() -> None:
    broker = memory_broker()
    life = Life(broker, {"model.factory": "tests.inference.models:Remembers", "batch.max_batch_size": 2})
    for number in range(60):
        publish(broker, str(number), POISON)
        life.turn(4)
    assert set(codes(broker).values()) == {"model_error"}
    assert len(codes(broker)) == 60
    assert life.worker._health.ready() == {}


def test_a_broken_model_costs_few_executions_per_try(broken: Path) -> None:
    broker = memory_broker()
    life = Life(broker, fragile(broken, **{"batch.max_batch_size": 32}))
    broken.touch()
    for number in range(32):
        publish(broker, str(number), number)
    life.turn(10)
    assert value(life.worker, "forebay_executions_total") is not None
    executions = value(life.worker, "forebay_executions_total") or 0
    assert executions <= 12 * (value(life.worker, "forebay_batch_cuts_total") or 1) + 12


def test_the_order_of_a_partition_outlives_an_open_breaker(broken: Path) -> None:
    broker = memory_broker()
    life = Life(broker, fragile(broken, **{"delivery.ordering": "partition", "batch.max_batch_size": 3}))
    broken.touch()
    for number in range(20):
        publish(broker, str(number), number)
    life.turn(30, seconds=1)
    assert codes(broker) == {}
    broken.unlink()
    life.turn(60, seconds=2)
    assert [(record.key or b"").decode() for record in broker.records("results")] == [str(n) for n in range(20)]
