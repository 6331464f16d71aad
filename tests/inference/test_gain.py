"""Several replicas of a model are compared with one before the worker joins its group."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from forebay.inference.assembly import build_pool
from forebay.inference.gain import COMPARED, Gain, compare, gain_of
from forebay.inference.messages import Measure, Measured, decode_to_replica, encode
from forebay.inference.rehearsal import measure, rehearse
from forebay.inference.replicas import Replica
from forebay.sections.inference import ModelSettings
from forebay.settings import Batch, Delivery, Inference
from tests.inference.models import Sums
from tests.inference.test_accelerator import accelerator
from tests.inference.test_runner import CPU, Bench

CURVE = [(0, 1, 0.001), (0, 8, 0.004)]


class Device:
    """Counts who measures on it at the same time."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []


class Runs:
    """The loop's end of a replica that does `rows` a second, or hangs up."""

    def __init__(self, name: str, device: Device, rows: list[int], hangs_up: bool = False) -> None:
        self._name, self._device, self._rows, self._hangs_up = name, device, deque(rows), hangs_up
        self._answers: deque[bytes] = deque()

    def send(self, message: bytes) -> None:
        asked = decode_to_replica(message)
        assert isinstance(asked, Measure)
        self._device.asked.append((self._name, asked.for_seconds))
        self._answers.append(encode(Measured(self._rows.popleft(), 1.0)))

    def receive(self) -> bytes | None:
        if self._hangs_up:
            raise EOFError
        return self._answers.popleft() if self._answers else None


def replicas(*transports: Runs) -> list[Replica]:
    start: Any = type("Start", (), {"model": "m"})()
    staging: Any = None
    return [Replica(transport._name, start, transport, staging) for transport in transports]  # type: ignore[arg-type]


def test_one_replica_is_measured_around_all_of_them_and_its_better_result_counts() -> None:
    device = Device()
    gain = gain_of(replicas(Runs("a", device, [90, 60, 100]), Runs("b", device, [50])), CURVE)
    assert [name for name, _ in device.asked] == ["a", "a", "b", "a"]
    assert sum(seconds for name, seconds in device.asked if name == "a") < 1
    assert gain == Gain(2, 100.0, 110.0)
    assert gain.mend == ""


def test_replicas_that_add_less_than_a_twentieth_are_told_with_what_to_set() -> None:
    gain = gain_of(replicas(Runs("a", Device(), [100, 52, 90]), Runs("b", Device(), [52])), CURVE)
    assert gain is not None
    assert gain.mend.startswith("2 replicas do 1.04 times what one does")
    assert "set inference.replicas to 1" in gain.mend


def test_nothing_is_measured_where_there_is_nothing_to_compare_or_it_would_take_long() -> None:
    device = Device()
    assert gain_of(replicas(Runs("a", device, [1])), CURVE) is None
    assert gain_of(replicas(Runs("a", device, [1]), Runs("b", device, [1])), [(0, 1, 0.1), (0, 8, 0.6)]) is None
    assert device.asked == []


def test_a_replica_that_dies_meanwhile_or_ran_nothing_is_no_reason_not_to_start() -> None:
    assert gain_of(replicas(Runs("a", Device(), [9], hangs_up=True), Runs("b", Device(), [9])), CURVE) is None
    assert gain_of(replicas(Runs("a", Device(), [9, 9, 9]), Runs("b", Device(), [0])), CURVE) is None


def test_replicas_that_run_inline_are_not_compared() -> None:
    inference = Inference(replicas=2, executor="inline", device="cpu")
    model = ModelSettings(name="m", factory="tests.models:Plain")
    pool = build_pool([model], (inference, Batch(), Delivery()), [Path.cwd()], iter(range(9)))
    pool.launch(0.0)
    while not pool.ready:
        pool.collect(0.0)
    pool.notices.clear()
    compare(pool)
    assert [notice.event for notice in pool.notices if notice.event == COMPARED] == []
    pool.stop()


@pytest.mark.parametrize("on", ["cpu", "accelerator"])
def test_a_replica_measures_whole_batches_from_its_slots(on: str) -> None:
    bench = Bench(Sums(), limit=8, device=CPU if on == "cpu" else accelerator())
    assert measure(bench.runner, Measure(0.0)).rows == 0, "it was not rehearsed"
    rehearse(bench.runner, bench.model, bench.start)
    before = len(bench.model.calls)  # type: ignore[attr-defined]
    assert measure(bench.runner, Measure(0.0)).rows == 8
    found = measure(bench.runner, Measure(0.05))
    assert found.rows == 8 * (len(bench.model.calls) - before - 1)  # type: ignore[attr-defined]
    assert found.seconds > 0
