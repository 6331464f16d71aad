"""The runner behind a real staging slot: whatever a batch does, every innocent request gets its own right result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from forebay import Model, TensorSpec
from forebay.errors import ModelError
from forebay.inference.devices import Device
from forebay.inference.example import DeviceLost
from forebay.inference.matching import finished
from forebay.inference.messages import Done, Run, Start
from forebay.inference.replicas import Replica
from forebay.inference.runner import Runner
from forebay.inference.staging import SlotSize, Staging
from forebay.inference.warmup import WarmUp, sizes, warm_up
from forebay.records import Batch, Code, Failure, Reason, Request, Signature, Timings
from tests.inference.models import Echo, Greedy, InPlace, Padded, Prepared, Sums, Words
from tests.unit.builders import request
from tests.unit.marks import CRASH, INFINITE, NOT_A_NUMBER, POISON

CPU = Device(torch.device("cpu"))


@dataclass
class Answers:
    """What came back: results as (raw bytes or list, rows) per output, by id; failures by id."""

    executions: int = 0
    results: dict[str, list[Any]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)

    def floats(self, name: str) -> list[float]:
        return [float(value) for value in np.frombuffer(self.results[name][0], "<f4")]

    def ints(self, name: str, output: int = 0) -> list[int]:
        return [int(value) for value in np.frombuffer(self.results[name][output], "<i8")]


class Bench:
    """A model, its runner and a staging area with two slots."""

    def __init__(
        self,
        model: Model,
        limit: int = 32,
        inputs: int = 1 << 16,
        outputs: int = 1 << 16,
        device: Device = CPU,
        **changes: Any,
    ) -> None:
        self.model = model
        self.device = device
        model.load(device.device)
        size = SlotSize(inputs, outputs)
        self.staging = Staging(size, 2)
        self.start = Start(
            "model", "1", "f", None, None, {}, "cpu", "fp32", None, limit, size.total, size.inputs, 2, []
        )
        for name, value in changes.items():
            assert hasattr(self.start, name)
            setattr(self.start, name, value)
        self.runner = Runner(model, device, self.start, self.staging.map)
        declared = [tuple(spec.declared for spec in specs) for specs in (model.inputs, model.outputs)]
        self.signature = Signature("model", "1", declared[0], declared[1], bool(model.prepared))
        self.replica = Replica("model-0", self.start, None, self.staging)  # type: ignore[arg-type]
        self.replica.signature = self.signature
        self.timings: list[Timings] = []
        self.done: Done | None = None

    def run(self, *requests: Request) -> Answers:
        """Run a batch, and what it left for want of room, until every request has its outcome."""
        answers, waiting, turns = Answers(), list(requests), 0
        while waiting:
            waiting = self._turn(answers, waiting)
            turns += 1
            assert turns <= len(requests)
        assert sorted([*answers.results, *answers.failures]) == sorted(one.id for one in requests)
        assert self.staging.free == 2
        return answers

    def warm_up(self) -> WarmUp:
        return warm_up(self.runner, self.model, self.device, self.start)

    def submit(self, requests: list[Request], bucket: int = 0) -> Run:
        """Write a batch into a slot."""
        batch = Batch(1, "model", requests, sum(one.rows for one in requests), Reason.IDLE, 0.0, bucket)
        job = self.staging.write(batch, self.signature)
        self.replica.running.append((batch, job))
        return job

    def _turn(self, answers: Answers, requests: list[Request]) -> list[Request]:
        self.done = self.runner.run(self.submit(requests))
        back = finished(self.replica, self.done, 0.0)
        self.timings.append(back.timings)
        answers.executions += back.timings.executions
        for members, outputs in back.results:
            begin, rows = 0, sum(one.rows for one in members)
            for one in members:
                end = begin + one.rows
                assert one.id not in answers.results, "a request got two results"
                answers.results[one.id] = [
                    out.content[begin * len(out.content) // rows : end * len(out.content) // rows] for out in outputs
                ]
                begin = end
        for one, failure in back.failures:
            assert one.id not in answers.failures
            answers.failures[one.id] = failure
        return back.left


def numbers(name: str, *rows: float) -> Request:
    """A request of rows (n, 0, 0, 1): the sum is n + 1."""
    content = np.array([[value, 0, 0, 1] for value in rows], "<f4").tobytes()
    return request(name, rows=len(rows), tensors=[content], shapes=[(len(rows), 4)])


def ordinary(count: int, bad: dict[int, float] | None = None) -> list[Request]:
    return [numbers(str(index), (bad or {}).get(index, float(index))) for index in range(count)]


def check_innocents(answers: Answers, count: int, guilty: set[int], scale: float = 1.0) -> None:
    for index in set(range(count)) - guilty:
        assert answers.floats(str(index)) == [scale * (index + 1)]
    assert set(answers.failures) == {str(index) for index in guilty}


# ---------------------------------------------------------------------- batches that work


def test_every_request_gets_its_own_rows_in_its_own_order() -> None:
    answers = Bench(Sums()).run(numbers("a", 1), numbers("b", 2, 3, 4), numbers("c", 5))
    assert answers.floats("a") == [2]
    assert answers.floats("b") == [3, 4, 5]
    assert answers.floats("c") == [6]
    assert answers.executions == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_requests_that_were_answered_already_cost_no_forward(rows: int) -> None:
    bench = Bench(Sums())
    requests = [numbers(str(index), *[float(index)] * rows) for index in range(4)]
    job = bench.submit(requests)
    job.skipped = [1, 2]
    done = bench.runner.run(job)
    bench.replica.running[0][0].answered.update({id(requests[1]), id(requests[2])})
    back = finished(bench.replica, done, 0.0)
    assert {members[0].id: outputs[0].content for members, outputs in back.results} == {
        "0": np.array([1.0] * rows, "<f4").tobytes(),
        "3": np.array([4.0] * rows, "<f4").tobytes(),
    }
    assert (back.failures, back.left, done.executions) == ([], [], 1)


def test_a_batch_of_which_all_was_answered_runs_nothing() -> None:
    bench = Bench(Sums())
    requests = ordinary(3)
    job = bench.submit(requests)
    job.skipped = [0, 1, 2]
    done = bench.runner.run(job)
    bench.replica.running[0][0].answered.update(map(id, requests))
    back = finished(bench.replica, done, 0.0)
    assert (back.results, back.failures, done.executions, bench.staging.free) == ([], [], 0, 2)


def test_slots_are_used_again_and_keep_nothing_of_the_batch_before() -> None:
    bench = Bench(Sums())
    for turn in range(5):
        answers = bench.run(*[numbers(str(index), turn * 100 + index) for index in range(3)])
        assert [answers.floats(str(index))[0] for index in range(3)] == [turn * 100 + index + 1 for index in range(3)]


def test_text_and_several_outputs_come_back_by_name_and_not_by_position() -> None:
    def words(name: str, text: list[bytes], times: list[int]) -> Request:
        content = np.array(times, "<i8").tobytes()
        return request(name, rows=len(text), tensors=[text, content], shapes=[(len(text),), (len(text),)])

    bench = Bench(Words())
    answers = bench.run(words("a", [b"x"], [2]), words("b", [b"", b"\xff"], [1, 3]))
    assert answers.results["a"] == [[b"xx"], np.array([4], "<i8").tobytes()]
    assert answers.results["b"][0] == [b"", b"\xff\xff\xff"]
    assert answers.ints("b", 1) == [2, 6]
    answers = bench.run(words("a", [b"x"], [2]), words("b", [b"ok", b"poison"], [1, 1]), words("c", [b"c"], [1]))
    assert set(answers.failures) == {"b"}
    assert answers.results["c"][0] == [b"c"]


def ids(name: str, *rows: list[int]) -> Request:
    content = np.array(rows, "<i8")
    return request(name, rows=len(rows), tensors=[content.tobytes()], shapes=[content.shape])


def test_rows_of_different_lengths_are_padded_and_nothing_else_changes() -> None:
    answers = Bench(Padded()).run(ids("a", [1, 2]), ids("b", [3, 4, 5], [6, 7, 8]), ids("c", [9]))
    assert answers.ints("a") == [1, 2, -1]
    assert answers.ints("b") == [3, 4, 5, 6, 7, 8]
    assert answers.ints("c") == [9, -1, -1]
    assert [answers.ints(name, 1) for name in "abc"] == [[2], [3, 3], [1]]


def test_a_request_larger_than_a_batch_runs_in_pieces_and_is_one_result() -> None:
    bench = Bench(Sums(), limit=8)
    answers = bench.run(numbers("big", *range(20)))
    assert bench.model.calls == [8, 8, 4]  # type: ignore[attr-defined]
    assert answers.executions == 3
    assert answers.floats("big") == [float(n + 1) for n in range(20)]


def test_an_oversize_request_with_text_is_cut_in_rows() -> None:
    content = np.arange(5, dtype="<i8").tobytes()
    words = [b"%d" % n for n in range(5)]
    answers = Bench(Words(), limit=2).run(request("a", rows=5, tensors=[words, content], shapes=[(5,), (5,)]))
    assert answers.results["a"][0] == [word * n for n, word in enumerate(words)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_model_computes_in_the_precision_asked_for_and_answers_in_its_own(precision: str) -> None:
    seen = []

    def answer(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x.sum(1)

    answers = Bench(Echo(answer), precision=precision).run(numbers("a", 1))
    assert seen == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]]
    assert answers.floats("a") == [2]


def test_forward_runs_under_inference_mode() -> None:
    modes = []

    def answer(x: torch.Tensor) -> torch.Tensor:
        modes.append(torch.is_inference_mode_enabled())
        return x.sum(1)

    Bench(Echo(answer)).run(numbers("a", 1))
    assert modes == [True]


# ---------------------------------------------------------------------- isolation


@pytest.mark.parametrize("guilty", [0, 11, 31])
def test_one_poison_among_32_costs_eleven_executions_and_nobody_else(guilty: int) -> None:
    answers = Bench(Sums()).run(*ordinary(32, {guilty: POISON}))
    check_innocents(answers, 32, {guilty})
    assert answers.executions == 11
    assert answers.failures[str(guilty)].code is Code.MODEL_ERROR
    assert "ValueError: a row of this batch is poison" in answers.failures[str(guilty)].message
    assert "models.py" in answers.failures[str(guilty)].message


def test_two_poisons_cost_at_most_nineteen_executions() -> None:
    answers = Bench(Sums()).run(*ordinary(32, {3: POISON, 28: POISON}))
    check_innocents(answers, 32, {3, 28})
    assert answers.executions <= 19


def test_a_batch_of_poison_alone_gives_every_request_its_error() -> None:
    answers = Bench(Sums()).run(*ordinary(8, dict.fromkeys(range(8), POISON)))
    check_innocents(answers, 8, set(range(8)))
    assert answers.executions == 15


def test_halving_never_cuts_a_request_in_two() -> None:
    answers = Bench(Sums()).run(numbers("a", 1, 2, 3), numbers("b", 4, POISON), numbers("c", 6))
    assert set(answers.failures) == {"b"}
    assert answers.floats("a") == [2, 3, 4]
    assert answers.floats("c") == [7]


@pytest.mark.parametrize("mark", [NOT_A_NUMBER, INFINITE])
def test_a_row_that_is_not_finite_costs_its_own_request_only(mark: float) -> None:
    answers = Bench(Sums()).run(*ordinary(16, {5: mark}))
    check_innocents(answers, 16, {5})
    assert answers.failures["5"].code is Code.NON_FINITE_OUTPUT
    assert answers.executions == 2


def test_a_row_that_is_finite_when_it_runs_alone_gets_its_result() -> None:
    def answer(x: torch.Tensor) -> torch.Tensor:
        y = x.sum(1)
        return y if len(x) == 1 else y * float("nan")

    answers = Bench(Echo(answer)).run(*ordinary(3))
    check_innocents(answers, 3, set())


def test_large_finite_numbers_are_not_taken_for_infinity() -> None:
    spec = TensorSpec("y", "FP64", [-1])
    answers = Bench(Echo(lambda x: torch.full((len(x),), 1.7e308, dtype=torch.float64), spec)).run(*ordinary(4))
    assert answers.failures == {}


def test_poison_and_rows_that_are_not_finite_are_told_apart() -> None:
    answers = Bench(Sums()).run(*ordinary(16, {2: POISON, 9: NOT_A_NUMBER}))
    check_innocents(answers, 16, {2, 9})
    assert answers.failures["2"].code is Code.MODEL_ERROR
    assert answers.failures["9"].code is Code.NON_FINITE_OUTPUT


@pytest.mark.parametrize("mark", [POISON, NOT_A_NUMBER])
def test_a_model_that_writes_into_its_input_spoils_no_second_try(mark: float) -> None:
    """The halves of a failed batch were cut from the tensor that the first try had changed: wrong results, silently."""
    answers = Bench(InPlace()).run(*ordinary(8, {5: mark}))
    check_innocents(answers, 8, {5}, scale=10)


def test_a_model_that_writes_into_its_input_leaves_the_next_batch_alone() -> None:
    bench = Bench(InPlace())
    for _ in range(3):
        check_innocents(bench.run(*ordinary(4)), 4, set(), scale=10)


# ---------------------------------------------------------------------- memory


def test_a_batch_that_does_not_fit_runs_in_halves() -> None:
    answers = Bench(Greedy(16)).run(*ordinary(32))
    check_innocents(answers, 32, set())
    assert answers.executions == 3


def test_a_request_of_more_rows_than_fit_runs_in_pieces() -> None:
    answers = Bench(Greedy(2)).run(numbers("large", 1, 2, 3), numbers("small", 4))
    assert answers.floats("large") == [2, 3, 4]
    assert answers.floats("small") == [5]


def hog(x: torch.Tensor) -> torch.Tensor:
    """Needs more memory than there is wherever a row begins with 7."""
    if bool((x[:, 0] == 7).any()):
        raise torch.OutOfMemoryError("CUDA out of memory")
    return x.sum(1)


def test_a_row_that_does_not_fit_alone_is_exhausted_and_the_others_are_not() -> None:
    answers = Bench(Echo(hog)).run(*ordinary(32))
    check_innocents(answers, 32, {7})
    assert answers.executions == 11
    assert answers.failures["7"].code is Code.RESOURCE_EXHAUSTED
    assert answers.failures["7"].retriable


def test_a_row_that_needs_too_much_memory_leaves_no_cap_behind() -> None:
    bench = Bench(Echo(hog))
    bench.run(*ordinary(32))
    answers = bench.run(*[numbers(str(n), float(100 + n)) for n in range(32)])
    assert (answers.executions, bench.done.cap) == (1, 0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "error", [MemoryError("x"), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate")]
)
def test_running_out_of_host_memory_counts_too(error: Exception) -> None:
    def answer(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            raise error
        return x.sum(1)

    check_innocents(Bench(Echo(answer)).run(*ordinary(4)), 4, set())


def test_outputs_that_do_not_fit_into_the_slot_together_come_back_all_the_same() -> None:
    """32 outputs of 4 KB and a slot of 64 KB: those behind the sixteenth got result_too_large."""
    spec = TensorSpec("y", "FP32", [-1, 1_024])
    answers = Bench(Echo(lambda x: x.sum(1, keepdim=True).expand(-1, 1_024), spec)).run(*ordinary(32))
    assert [failure.code for failure in answers.failures.values()] == []
    assert answers.floats("31") == [32.0] * 1_024


def test_an_output_larger_than_the_slot_is_its_own_requests_error() -> None:
    def answer(x: torch.Tensor) -> list[bytes]:
        return [b"x" * (100_000 if float(row[0]) == 2 else 10) for row in x]

    answers = Bench(Echo(answer, TensorSpec("y", "BYTES", [-1]))).run(*ordinary(4))
    assert set(answers.failures) == {"2"}
    assert answers.failures["2"].code is Code.RESULT_TOO_LARGE
    assert answers.results["3"] == [[b"x" * 10]]


def test_a_large_batch_with_a_row_that_is_not_finite_is_no_crash() -> None:
    """What did not fit into the slot was caught only where every row was finite."""

    def answer(x: torch.Tensor) -> torch.Tensor:
        y = x.sum(1, keepdim=True).repeat(1, 5_000)
        y[x[:, 0] == NOT_A_NUMBER] = float("nan")
        return y

    answers = Bench(Echo(answer, TensorSpec("y", "FP32", [-1, 5_000]))).run(*ordinary(4, {1: NOT_A_NUMBER}))
    assert answers.failures["1"].code is Code.NON_FINITE_OUTPUT


def test_a_device_that_is_lost_is_nobodys_error() -> None:
    with pytest.raises(DeviceLost, match="device-side assert"):
        Bench(Sums()).run(*ordinary(4, {1: CRASH}))


# ---------------------------------------------------------------------- outputs that break the declaration


TWO = (TensorSpec("a", "FP32", [-1]), TensorSpec("b", "FP32", [-1]))


@pytest.mark.parametrize(
    ("answer", "outputs", "mentions"),
    [
        (lambda x: x.sum(1)[:-1], (), "rows"),
        (lambda x: x, (), "shape"),
        (lambda x: x.sum(), (), "shape"),
        (lambda x: x.sum(1).long(), (), "int64"),
        (lambda x: x.sum(1) > 0, (), "bool"),
        (lambda x: x.sum(1).tolist(), (), "list"),
        (lambda x: None, (), "NoneType"),
        (lambda x: {"z": x.sum(1)}, (), "'y'"),
        (lambda x: x.sum(1), TWO, "dict"),
        (lambda x: (x.sum(1), x.sum(1)), TWO, "dict"),
        (lambda x: {"a": x.sum(1)}, TWO, "'b'"),
        (lambda x: [b"a"] * (len(x) + 1), (TensorSpec("y", "BYTES", [-1]),), "rows"),
        (lambda x: x.sum(1), (TensorSpec("y", "BYTES", [-1]),), "BYTES"),
        (lambda x: None, (TensorSpec("y", "BYTES", [-1]),), "BYTES"),
        (lambda x: x.sum(1), (TensorSpec("y", "INT64", [-1]),), "float32"),
        (lambda x: torch.full((len(x),), 300), (TensorSpec("y", "UINT8", [-1]),), "int64"),
        (lambda x: x.sum(1) > 0, (TensorSpec("y", "INT64", [-1]),), "bool"),
    ],
)
def test_an_output_that_is_not_as_declared_is_an_error_and_never_a_guess(
    answer: Any, outputs: tuple[TensorSpec, ...], mentions: str
) -> None:
    answers = Bench(Echo(answer, *outputs)).run(*ordinary(2))
    assert answers.results == {}
    for failure in answers.failures.values():
        assert failure.code is Code.MODEL_ERROR
        assert mentions in failure.message
        assert "Traceback" not in failure.message


def test_a_model_that_loses_rows_answers_nobody() -> None:
    answers = Bench(Echo(lambda x: x.sum(1)[: max(len(x) - 1, 0)])).run(*ordinary(32))
    assert len(answers.failures) == 32


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP64"])
def test_floats_of_another_width_are_converted(datatype: str) -> None:
    answers = Bench(Echo(lambda x: x.sum(1), TensorSpec("y", datatype, [-1]))).run(*ordinary(2))
    assert answers.failures == {}
    if datatype == "FP64":
        assert np.frombuffer(answers.results["1"][0], "<f8").tolist() == [2.0]


def test_a_float_that_its_declared_type_cannot_hold_is_not_finite() -> None:
    answers = Bench(Echo(lambda x: x.sum(1) * 60_000, TensorSpec("y", "FP16", [-1]))).run(*ordinary(3))
    assert {name: failure.code for name, failure in answers.failures.items()} == {
        "1": Code.NON_FINITE_OUTPUT,
        "2": Code.NON_FINITE_OUTPUT,
    }


def test_outputs_whose_size_varies_come_back_with_their_dimensions() -> None:
    bench = Bench(Echo(lambda x: x[:, : 1 + int(x[0, 0])], TensorSpec("y", "FP32", [-1, -1])))
    assert bench.run(numbers("a", 0)).floats("a") == [0]
    assert bench.run(numbers("a", 2)).floats("a") == [2, 0, 0]


def test_an_output_without_elements_is_fine() -> None:
    bench = Bench(Echo(lambda x: x[:, :0], TensorSpec("boxes", "FP32", [-1, -1])))
    assert bench.run(*ordinary(2)).results == {"0": [b""], "1": [b""]}


def test_text_may_be_returned_as_str() -> None:
    bench = Bench(Echo(lambda x: ["grün"] * len(x), TensorSpec("y", "BYTES", [-1])))
    assert bench.run(numbers("a", 1)).results["a"] == [["grün".encode()]]


def test_an_output_that_is_a_view_of_the_input_is_copied_out() -> None:
    answers = Bench(Echo(lambda x: x[:, 0])).run(*ordinary(4))
    assert [answers.floats(str(index)) for index in range(4)] == [[0], [1], [2], [3]]


# ---------------------------------------------------------------------- prepare


def lines(name: str, *text: bytes) -> Request:
    return request(name, rows=len(text), tensors=[list(text)], shapes=[(len(text),)])


def test_prepared_requests_are_padded_together() -> None:
    answers = Bench(Prepared()).run(lines("a", b"1 2 3"), lines("b", b"4", b"5 6"), lines("c", b"7"))
    assert [answers.ints(name) for name in "abc"] == [[6], [4, 11], [7]]
    assert answers.executions == 1


def test_what_prepare_raises_is_that_requests_error_alone() -> None:
    answers = Bench(Prepared()).run(lines("a", b"1"), lines("bad", b"one"), lines("c", b"3"))
    assert [answers.ints(name) for name in "ac"] == [[1], [3]]
    assert answers.failures["bad"].code is Code.MODEL_ERROR
    assert "prepare" in answers.failures["bad"].message


def test_a_batch_whose_requests_all_fail_to_prepare_runs_nothing() -> None:
    answers = Bench(Prepared()).run(lines("a", b"x"), lines("b", b"y"))
    assert set(answers.failures) == {"a", "b"}
    assert answers.executions == 0


class Tokens(Prepared):
    """Prepares text into text; loses or adds elements where the line says so."""

    prepared = (TensorSpec("words", "BYTES", [-1]),)

    def prepare(self, text: list[bytes]) -> Any:
        return [text[0], b"one too many"] if text[0] == b"more" else [] if text[0] == b"less" else text

    def forward(self, words: list[bytes]) -> Any:  # type: ignore[override]
        return torch.tensor([len(word) for word in words])


def test_prepared_text_with_too_many_or_too_few_elements_shifts_no_other_row() -> None:
    """Elements were joined unchecked: one more here and one less there gave the rows between a neighbour's result."""
    answers = Bench(Tokens()).run(lines("a", b"more"), lines("b", b"bb"), lines("c", b"less"), lines("d", b"dddd"))
    assert set(answers.failures) == {"a", "c"}
    assert (answers.ints("b"), answers.ints("d")) == ([2], [4])


# ---------------------------------------------------------------------- warm-up


@pytest.mark.parametrize(("largest", "expected"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])])
def test_every_size_class_up_to_the_largest_is_warmed(largest: int, expected: list[int]) -> None:
    assert sizes(largest) == expected


@pytest.mark.parametrize("model", [Sums(), Words(), Padded(), Prepared()])
def test_a_model_is_warmed_with_zeros_or_its_example(model: Model) -> None:
    bench = Bench(model, limit=4)
    found = bench.warm_up()
    assert [rows for _, rows, _ in found.curve] == [1, 2, 4]
    assert all(seconds > 0 for *_, seconds in found.curve)


def test_a_model_that_breaks_its_declaration_is_found_out_before_the_first_request() -> None:
    bench = Bench(Echo(lambda x: x), limit=2)
    with pytest.raises(ModelError, match=r"warm-up.*shape"):
        bench.warm_up()


def test_a_model_that_trains_itself_is_found_out_before_the_first_request() -> None:
    class Trains(Sums):
        def load(self, device: torch.device) -> None:
            super().load(device)
            self.net = torch.nn.Dropout().eval()

        def forward(self, x: torch.Tensor) -> Any:
            self.net.train()
            return x.sum(1)

    bench = Bench(Trains())
    with pytest.raises(ModelError, match="training mode"):
        bench.warm_up()


def test_an_example_that_fails_is_the_models_mistake() -> None:
    class Bad(Sums):
        def example(self) -> Any:
            return {"y": 1}

    bench = Bench(Bad())
    with pytest.raises(ModelError, match=r"example\(\).*'x'"):
        bench.warm_up()
