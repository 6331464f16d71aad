"""The corridor with real preparers before its batcher, on the in-memory double and on real Kafka."""

from __future__ import annotations

import json

import numpy as np
import pytest

from forebay.wire import InferenceError, Result, build_request, parse_outcome
from tests.contract.sides import Side, run_to_end
from tests.kafka_probe import Read, Send

MODEL = {"model.factory": "tests.inference.models:Prepared", "inference.prepare_workers": 1}


def ask(name: str, *lines: bytes, encoding: str = "binary") -> Send:
    value, headers = build_request({"text": list(lines)}, encoding=encoding)  # type: ignore[arg-type]
    return Send(value, name.encode(), headers)


def sums(outcomes: list[Read]) -> dict[str, list[int] | str]:
    """The numbers of every result, the code of every error, by id; an id that came out twice is an error."""
    found: dict[str, list[int] | str] = {}
    for one in outcomes:
        outcome = parse_outcome(one.value or b"", list(one.headers))
        assert outcome.id not in found, f"{outcome.id} has two outcomes"
        if isinstance(outcome, Result):
            found[outcome.id] = np.asarray(outcome["sum"]).tolist()
        else:
            assert isinstance(outcome, InferenceError)
            found[outcome.id] = outcome.code
    return found


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_requests_of_every_length_and_encoding_share_batches_once_they_are_prepared(side: Side, executor: str) -> None:
    expected: dict[str, list[int] | str] = {}
    sends = []
    for number in range(80):
        lines = [" ".join(map(str, range(1 + (number + row) % 7))).encode() for row in range(1 + number % 3)]
        sends.append(ask(str(number), *lines, encoding=("json", "binary")[number % 2]))
        expected[str(number)] = [sum(map(int, line.split())) for line in lines]
    sends.insert(30, ask("words", b"one two"))
    sends.insert(60, Send(b"{", b"broken"))
    expected |= {"words": "model_error", "broken": "invalid_payload"}
    side.send(sends)
    run_to_end(side, {**MODEL, "inference.executor": executor, "batch.max_batch_size": 16})

    outcomes = side.read(side.results)
    assert sums(outcomes) == expected
    assert max(int(one.header("batch-size") or 0) for one in outcomes) > 3, "nothing was batched"
    [told] = [json.loads(one.value or b"") for one in outcomes if one.key == b"words"]
    assert told["error"].startswith("prepare: ValueError: invalid literal for int() with base 10: b'one' (models.py:")
    assert sorted(one.key or b"" for one in side.read(side.dead)) == [b"broken", b"words"]


def test_a_cost_that_prepare_says_bounds_real_batches(side: Side) -> None:
    side.send(ask(str(n), b"1 2 3") for n in range(24))
    model = {**MODEL, "model.factory": "tests.models:Priced"}
    run_to_end(side, {**model, "batch.max_batch_cost": 9, "batch.max_batch_size": 16})
    outcomes = side.read(side.results)
    assert sums(outcomes) == {str(n): [6] for n in range(24)}
    assert max(int(one.header("batch-size") or 0) for one in outcomes) <= 3
