"""Continuous batching: a real pool with its replica inline, one step for each look for an answer."""

from __future__ import annotations

import json
import random
import re
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay import TensorSpec
from forebay.errors import ConfigError, ModelError
from forebay.inference.assembly import build_pool
from forebay.inference.completion import one_row
from forebay.inference.declared import ContractError
from forebay.inference.inline import InlineTransport
from forebay.inference.stepping import Stepping
from forebay.records import Batch, Code, Failure, Reason, Request
from forebay.testing import MemoryBroker, memory_settings, run_to_end
from tests.inference.stepwise import ENDLESS, FAILS, NEVER_BEGINS, NOT_A_NUMBER, Counting
from tests.unit.builders import request

ROOT = Path(__file__).resolve().parents[2]


class Scene:
    """A pool with one replica; a request is its number of steps, its result what it passed."""

    def __init__(self, rows: int = 8, **values: Any) -> None:
        settings = memory_settings(
            {
                "model.factory": "tests.inference.stepwise:Counting",
                "batch.max_batch_size": rows,
                **{key.replace("__", "."): value for key, value in values.items()},
            }
        )
        self.numbers = count(1)
        sections = (settings.inference, settings.batch, settings.delivery)
        self.pool = build_pool(settings.served, sections, [ROOT], self.numbers)
        self.now = 0.0
        self.turns = 0
        self.ended: dict[str, int] = {}
        self.results: dict[str, list[int]] = {}
        self.halves: dict[str, list[float]] = {}
        self.failures: dict[str, Failure] = {}
        self.rows: dict[str, int] = {}
        self.unsound: list[str] = []
        self.waiting: list[tuple[str, Request]] = []
        self.pool.launch(0.0)
        while not self.pool.ready:
            self.pool.collect(self.now)
        self.replica = next(iter(self.pool.of("model")))
        model = self.stepping._steps._model
        assert isinstance(model, Counting)
        self.model = model
        model.sizes.clear()
        model.begun.clear()

    @property
    def stepping(self) -> Stepping:
        transport = self.replica.transport
        assert isinstance(transport, InlineTransport)
        assert transport._stepping is not None
        return transport._stepping

    def ask(self, *numbers: int, name: str = "", deadline: float | None = None) -> None:
        raw = np.array(numbers, "<i8").tobytes()
        one = request(
            name or str(numbers[0]),
            rows=len(numbers),
            deadline=deadline,
            tensors=[raw],
            shapes=[(len(numbers), 1)],
        )
        self.waiting.append((one.id, one))

    def submit(self, *, together: bool = False) -> None:
        """Submit what the pool has room for, as dispatch does."""
        while self.waiting and self.pool.free_at("model") is not None:
            taken = self.waiting if together else self.waiting[:1]
            self.waiting = [] if together else self.waiting[1:]
            requests = [one for _, one in taken]
            rows = sum(one.rows for one in requests)
            batch = Batch(next(self.numbers), "model", requests, rows, Reason.STEP, self.now)
            batch.deadline = min((one.deadline for one in requests if one.deadline is not None), default=None)
            self.pool.submit(batch, self.now)

    def turn(self) -> None:
        """Run one step and take in what has ended."""
        self.turns += 1
        for back in self.pool.collect(self.now):
            self.unsound += [back.unsound] if back.unsound else []
            for members, outputs in back.results:
                (member,) = members
                content = outputs[0].content
                assert isinstance(content, bytes)
                assert isinstance(outputs[1].content, bytes)
                assert member.id not in self.ended
                self.results[member.id] = [int(value) for value in np.frombuffer(content, "<i8")]
                self.halves[member.id] = [float(value) for value in np.frombuffer(outputs[1].content, "<f4")]
                self.ended[member.id], self.rows[member.id] = len(self.model.sizes), back.rows
            for member, failure in back.failures:
                assert member.id not in self.ended
                self.failures[member.id], self.ended[member.id] = failure, len(self.model.sizes)

    def run(self) -> None:
        for _ in range(5_000):
            if not (self.waiting or self.pool.in_flight):
                break
            self.submit()
            self.turn()
        assert not self.pool.in_flight
        self.pool.stop()


def counted(number: int) -> list[int]:
    return list(range(number))


def codes(scene: Scene) -> dict[str, Code]:
    return {name: failure.code for name, failure in scene.failures.items()}


def test_a_row_that_ends_leaves_at_once_and_the_next_one_has_its_place_in_the_next_step() -> None:
    """Rule S33: of 20 and 200 steps, two at a time, the short one is back at step 20, a third begins with step 21."""
    scene = Scene(2)
    for number in (20, 200, 30):
        scene.ask(number)
    scene.run()
    assert scene.ended == {"20": 20, "30": 50, "200": 200}
    assert {name: len(passed) for name, passed in scene.results.items()} == {"20": 20, "30": 30, "200": 200}
    assert scene.model.begun == [2, 1]
    assert (scene.rows["20"], scene.rows["200"]) == (2, 1)


def test_a_static_batch_is_answered_when_its_longest_row_has_ended() -> None:
    scene = Scene(2, batch__dispatch="static")
    scene.ask(20)
    scene.ask(200)
    scene.submit(together=True)
    scene.ask(30)
    scene.run()
    assert scene.ended == {"20": 200, "200": 200, "30": 230}
    assert {name: len(passed) for name, passed in scene.results.items()} == {"20": 20, "30": 30, "200": 200}


def test_rows_of_one_request_have_one_result_padded_as_declared() -> None:
    scene = Scene(2)
    scene.ask(3, 1, 2, name="several")
    scene.ask(2, name="other")
    scene.run()
    assert scene.results == {"several": [0, 1, 2, 0, -1, -1, 0, 1, -1], "other": [0, 1]}
    assert scene.halves["several"] == [1.5, 0.5, 1.0]


@pytest.mark.parametrize("mark", [FAILS, NEVER_BEGINS])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_row_whose_step_or_begin_fails_costs_the_others_nothing_but_time(mark: int, place: int) -> None:
    scene = Scene(8)
    for index in range(20):
        scene.ask(mark if index == place else 4 + index, name=f"r{index}")
    scene.run()
    assert codes(scene) == {f"r{place}": Code.MODEL_ERROR}
    assert scene.results == {f"r{index}": counted(4 + index) for index in range(20) if index != place}


def test_two_guilty_rows_among_many_are_found_and_nobody_else() -> None:
    scene = Scene(8)
    for index in range(16):
        scene.ask(FAILS if index in (2, 6) else 12, name=f"r{index}")
    scene.run()
    assert codes(scene) == {"r2": Code.MODEL_ERROR, "r6": Code.MODEL_ERROR}
    assert len(scene.results) == 14
    assert all(passed == counted(12) for passed in scene.results.values())


def test_a_row_that_is_not_finite_runs_again_alone_and_is_told_so() -> None:
    scene = Scene(4)
    for index in range(6):
        scene.ask(NOT_A_NUMBER if index == 1 else 5, name=f"r{index}")
    scene.run()
    assert codes(scene) == {"r1": Code.NON_FINITE_OUTPUT}
    assert len(scene.results) == 5
    assert 1 in scene.model.sizes[3:6]


def test_a_row_that_never_ends_is_an_error_that_names_the_setting() -> None:
    scene = Scene(4, inference__max_steps=10)
    scene.ask(ENDLESS)
    scene.ask(4)
    scene.run()
    assert scene.results == {"4": counted(4)}
    assert codes(scene) == {str(ENDLESS): Code.MODEL_ERROR}
    assert "inference.max_steps (10)" in scene.failures[str(ENDLESS)].message
    assert scene.ended[str(ENDLESS)] == 10


def test_what_does_not_fit_begins_again_with_fewer_rows_and_all_are_answered() -> None:
    scene = Scene(8)
    scene.model.room = 4
    for index in range(12):
        scene.ask(5 + index, name=f"r{index}")
    scene.run()
    assert scene.results == {f"r{index}": counted(5 + index) for index in range(12)}
    assert not scene.failures
    assert max(scene.model.sizes[1:]) <= 4


def test_states_that_outgrow_an_accelerator_are_let_go_of_before_fewer_rows_begin_again() -> None:
    """The fake counts what torch keeps alive: a state that a frame or a list still held would leave no room for any."""
    factory = "tests.inference.stepwise:Hoarding"
    scene = Scene(8, inference__device="fake:0?memory=300000", model__factory=factory)
    for index in range(8):
        scene.ask(12 + index, name=f"r{index}")
    scene.ask(200, name="hog")
    scene.run()
    assert codes(scene) == {"hog": Code.RESOURCE_EXHAUSTED}
    assert scene.results == {f"r{index}": counted(12 + index) for index in range(8)}


def test_a_row_that_does_not_fit_alone_is_told_so_and_leaves_no_cap_behind() -> None:
    scene = Scene(4)
    scene.model.room = 1
    scene.ask(100)
    scene.ask(5)
    scene.ask(6)
    scene.run()
    assert codes(scene) == {"100": Code.RESOURCE_EXHAUSTED}
    assert scene.results == {"5": counted(5), "6": counted(6)}


def test_a_deadline_takes_a_row_out_of_what_runs() -> None:
    scene = Scene(2)
    scene.ask(50, deadline=5.0)
    scene.ask(20)
    scene.ask(10)
    scene.submit()
    for _ in range(5):
        scene.turn()
    scene.now = 6.0
    assert [one.id for one in scene.pool.expire(scene.now)] == ["50"]
    scene.run()
    assert scene.results == {"20": counted(20), "10": counted(10)}
    assert scene.model.sizes.count(2) == 15  # the third had the place from the next step on
    assert len(scene.model.sizes) == 20


def test_a_model_that_fails_its_example_too_says_so_with_every_request() -> None:
    scene = Scene(4)
    scene.model.is_broken = True
    for index in range(4):
        scene.ask(5, name=f"r{index}")
    scene.run()
    assert len(scene.failures) == 4
    assert all("broken" in why for why in scene.unsound)
    assert len(scene.unsound) == 4


def some_request(dice: random.Random, room: int) -> tuple[list[int], Any]:
    """Return a request and what is to come of it: what it passed, padded, or a code."""
    numbers = [dice.randint(1, 30) for _ in range(dice.choice([1, 1, 1, 2, 3]))]
    fate = dice.random()
    if fate < 0.08:
        return [*numbers[1:], dice.choice([FAILS, NEVER_BEGINS])], Code.MODEL_ERROR
    if fate < 0.14:
        return [NOT_A_NUMBER, *numbers[1:]], Code.NON_FINITE_OUTPUT
    if fate < 0.18 and room == 1:
        return [100], Code.RESOURCE_EXHAUSTED
    widest = max(numbers)
    return numbers, [step if step < number else -1 for number in numbers for step in range(widest)]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_fails_at_once_every_request_gets_what_it_gets_alone(seed: int) -> None:
    dice = random.Random(seed)
    scene = Scene(dice.choice([1, 2, 3, 8]))
    scene.model.room = dice.choice([1 << 30, 1 << 30, 1, 2, 3, 5])
    expected: dict[str, Any] = {}
    for index in range(dice.randint(5, 40)):
        numbers, expected[f"r{index}"] = some_request(dice, scene.model.room)
        scene.ask(*numbers, name=f"r{index}")
    scene.run()
    assert {**scene.results, **codes(scene)} == expected
    assert scene.replica._staging.free == scene.replica._staging.slots


def test_rows_that_nobody_may_answer_any_more_stop_and_come_back() -> None:
    """As after a revocation: the record of the request is refused by its partition's ledger, whatever comes of it."""
    scene = Scene(2)
    scene.ask(500, name="revoked")
    scene.ask(6)
    scene.ask(7)
    scene.submit()
    scene.turn()
    scene.pool.stop_steps(lambda one: one.id == "revoked")
    scene.run()
    assert codes(scene) == {"revoked": Code.INTERNAL}
    assert scene.results == {"6": counted(6), "7": counted(7)}
    assert len(scene.model.sizes) < 10


def test_no_slot_is_lost_and_none_is_taken_twice() -> None:
    scene = Scene(4)
    for index in range(100):
        scene.ask(1 + index % 7, name=f"r{index}")
    scene.submit()
    assert len(scene.replica.running) == 5
    scene.run()
    assert len(scene.results) == 100
    assert scene.replica._staging.free == scene.replica._staging.slots == 6


def ask_in(broker: MemoryBroker, name: str, numbers: list[int]) -> None:
    tensor = {"name": "n", "shape": [len(numbers), 1], "datatype": "INT64", "data": numbers}
    broker.append("requests", json.dumps({"inputs": [tensor]}).encode(), name.encode(), [])


def test_a_request_that_is_too_large_for_its_share_of_the_staging_memory_is_refused_with_the_numbers() -> None:
    """Two slots of 1,024 bytes and 64 KiB make 451 of 256 bytes for 400 rows, of which alignment may take 64."""
    broker = MemoryBroker({"requests": 1, "results": 1, "dead": 1})
    ask_in(broker, "fits", [3] * 24)
    ask_in(broker, "large", [2] * 25)
    values = {"model.factory": "tests.inference.stepwise:Counting", "batch.max_batch_bytes": 1_024}
    run_to_end(broker, {**values, "batch.max_batch_size": 400}, ROOT)
    answers = {(one.key or b"").decode(): one for one in broker.records("results")}
    assert dict(answers["fits"].headers)["status"] == b"ok"
    assert dict(answers["large"].headers)["error-code"] == b"too_large"
    assert b"batch.max_batch_bytes is 1024, of which" in (answers["large"].value or b"")


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"inference__compile": "inductor"}, "inference.compile"),
        ({"batch__allowed_batch_sizes": [1, 8]}, "allowed_batch_sizes"),
        ({"batch__max_batch_cost": 8}, "max_batch_cost"),
    ],
)
def test_settings_that_steps_cannot_follow_stop_the_start(values: dict[str, Any], word: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=word):
        Scene(8, **values)


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ("x", "step() gave o a str, not a tensor"),
        ({"p": torch.arange(2)}, "ended a row without output 'o'"),
        (torch.tensor([1.5]), "convert it with .to(torch.int64)"),
    ],
)
def test_what_a_row_ends_with_is_checked_against_what_was_declared(ended: Any, said: str) -> None:
    with pytest.raises(ContractError, match=re.escape(said)):
        one_row("M", [TensorSpec("o", "INT64", [-1, -1])], ended)
