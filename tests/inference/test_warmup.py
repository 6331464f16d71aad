"""The warm-up: every shape that may run has run, and what does not fit is known before the first request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from forebay import Model, TensorSpec
from forebay.errors import ModelError
from forebay.inference.devices import open_device
from forebay.inference.rehearsal import rehearse
from forebay.inference.warmup import WarmUp, with_fewer_threads
from tests.inference.models import Greedy, Padded, Sums
from tests.inference.test_accelerator import Wide
from tests.inference.test_runner import Answers, Bench, ids, numbers, ordinary


class Shapes(Model):
    """Remembers the shapes that it ran."""

    inputs = (TensorSpec("ids", "INT64", [-1, -1], pad=-1), TensorSpec("x", "FP32", [-1, 2]))
    outputs = (TensorSpec("length", "INT64", [-1]),)

    def load(self, device: torch.device) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> Any:
        self.shapes.append(tuple(ids.shape))
        assert len(x) == len(ids)
        return (ids >= 0).sum(1)


def test_every_allowed_size_of_every_bucket_runs_three_times() -> None:
    model = Shapes()
    bench = Bench(model, sizes=[1, 4, 32], buckets=[8, 64])
    found = bench.warm_up()
    ran = Counter(model.shapes[:-1])  # the last is the example that is kept
    assert ran == {(rows, length): 3 for rows in (1, 4, 32) for length in (8, 64)}
    assert [(bucket, rows) for bucket, rows, _ in found.curve] == [
        (length, rows) for length in (8, 64) for rows in (1, 4, 32)
    ]


def test_without_allowed_sizes_the_powers_of_two_run() -> None:
    model = Shapes()
    Bench(model, limit=12).warm_up()
    assert sorted({rows for rows, _ in model.shapes}) == [1, 2, 4, 8, 12]


def test_a_shape_that_no_slot_can_hold_is_left_out() -> None:
    model = Shapes()
    Bench(model, sizes=[1, 32], buckets=[8, 512]).warm_up()
    assert (32, 512) not in model.shapes
    assert (1, 512) in model.shapes


@pytest.mark.parametrize(("unit", "most"), [("rows", 4), ("elements", 4 * 10), ("bytes", 4 * (8 * 8 + 2 * 4))])
def test_a_batch_that_weighs_more_than_a_batch_may_is_left_out(unit: str, most: int) -> None:
    """512 rows of the longest bucket ran at the start where max_batch_cost allows 32 of them: minutes, or no memory."""
    model = Shapes()
    Bench(model, limit=8, buckets=[8], max_cost=most, cost_unit=unit).warm_up()
    assert sorted({rows for rows, _ in model.shapes}) == [1, 2, 4]
    Bench(model, limit=8, buckets=[64], max_cost=1, cost_unit=unit).warm_up()
    assert (1, 64) in model.shapes
    assert (2, 64) not in model.shapes


def test_a_rehearsal_weighs_no_more_than_a_batch_may() -> None:
    model = Shapes()
    bench = Bench(model, limit=8, max_cost=54, cost_unit="elements")
    rehearse(bench.runner, model, bench.start)
    assert {rows for rows, _ in model.shapes} == {3}


def test_a_row_of_padding_alone_is_never_tried() -> None:
    """Attention that masks its padding fails, or gives NaN, where there is nothing else; zeros were all padding."""

    class Attends(Padded):
        inputs = (TensorSpec("ids", "INT64", [-1, -1], pad=0),)

        def forward(self, ids: torch.Tensor) -> Any:
            assert bool((ids != 0).any(1).all()), "nothing to attend to"
            return super().forward(ids)

    bench = Bench(Attends())
    assert bench.warm_up().curve


def test_a_model_that_takes_no_zeros_is_told_to_give_an_example() -> None:
    class Picky(Sums):
        def forward(self, x: torch.Tensor) -> Any:
            raise ValueError("no zeros")

    class Broken(Picky):
        def example(self) -> dict[str, Any]:
            return {"x": [[1.0] * 4]}

    with pytest.raises(ModelError, match=r"warm-up: ValueError: no zeros.*let its example\(\) return a request"):
        Bench(Picky()).warm_up()
    with pytest.raises(ModelError, match=r"no zeros \([^)]*\)$"):
        Bench(Broken()).warm_up()


def test_a_normalisation_in_training_mode_is_told_in_one_clear_sentence() -> None:
    """It said only `Expected more than 1 value per channel when training`: a batch of one row has no variance."""

    class Trains(Sums):
        def load(self, device: torch.device) -> None:
            super().load(device)
            self.norm = torch.nn.BatchNorm1d(4).eval()

        def forward(self, x: torch.Tensor) -> Any:
            self.norm.train()
            return self.norm(x).sum(1)

    class Functional(Sums):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.nn.functional.batch_norm(x, None, None, training=True).sum(1)

    with pytest.raises(ModelError, match=r"Trains: BatchNorm1d is in training mode.*must not call train\(\)$"):
        Bench(Trains()).warm_up()
    with pytest.raises(ModelError, match=r"would mix a batch's requests: call it with training=False$"):
        Bench(Functional()).warm_up()


def test_batches_run_in_allowed_shapes_only_and_results_are_cut_back() -> None:
    model = Shapes()
    bench = Bench(model, limit=8, sizes=[2, 8], buckets=[4, 8])

    def request(name: str, *rows: list[int]) -> Any:
        one = ids(name, *rows)
        one.tensors, one.shapes = [*one.tensors, bytes(8 * one.rows)], [*one.shapes, (one.rows, 2)]
        return one

    answers: Answers = bench.run(request("a", [1, 2]), request("b", [3, 4, 5]), request("c", [1, 1, 1]))
    assert [answers.ints(name) for name in "abc"] == [[2], [3], [3]]
    assert bench.run(request("d", [1, 2, 3, 4, 5])).ints("d") == [5]
    assert bench.run(request("e", *[[9]] * 11)).ints("e") == [1] * 11
    assert model.shapes == [(8, 4), (2, 8), (8, 4), (8, 4)]


def test_rows_that_only_fill_up_are_nobodys_and_cost_nobody() -> None:
    bench = Bench(Sums(), limit=8, sizes=[8])
    answers = bench.run(*ordinary(5, {4: -1.0}))
    assert set(answers.failures) == {"4"}
    assert [answers.floats(str(n)) for n in range(4)] == [[n + 1.0] for n in range(4)]
    assert set(bench.model.calls) == {8}  # type: ignore[attr-defined]


def test_peaks_are_measured_where_the_device_can_say() -> None:
    found = Bench(Wide(), limit=4, device=open_device("fake?memory=1MiB")).warm_up()
    assert [(bucket, rows) for bucket, rows, _ in found.peaks] == [(0, 1), (0, 2), (0, 4)]
    assert [size // 4_096 for *_, size in found.peaks] == [1, 2, 4]
    assert Bench(Wide(), limit=4).warm_up().peaks == []


def test_a_size_that_does_not_fit_at_the_start_is_a_cap_and_no_failure() -> None:
    device = open_device("fake?memory=40000")
    bench = Bench(Wide(), device=device)
    found = bench.warm_up()
    assert [rows for _, rows, _ in found.curve] == [1, 2, 4, 8]
    assert found.notes == ["16 rows do not fit into the device's memory: the cap is 8"]
    answers = bench.run(*ordinary(32))
    assert answers.executions == 4
    assert bench.timings[-1].cap == 8


def test_a_model_of_which_no_row_fits_stops_the_start() -> None:
    with pytest.raises(ModelError, match=r"warm-up.*out of memory"):
        Bench(Greedy(0)).warm_up()


def test_the_caps_of_padded_requests_are_by_bucket() -> None:
    bench = Bench(Padded(), device=open_device("fake?memory=16rows"), buckets=[8])
    bench.warm_up()
    assert bench.runner.memory_caps.known(8) == 16
    assert bench.runner.memory_caps.known(4) == 0


def test_a_row_after_the_warm_up_is_nothing_new_to_the_example() -> None:
    bench = Bench(Sums())
    bench.warm_up()
    assert bench.run(numbers("a", 1)).floats("a") == [2]


# ---------------------------------------------------------------------- threads


@pytest.mark.parametrize(
    ("several", "one", "kept"),
    [(0.010, 0.010, 1), (0.010, 0.0129, 1), (0.010, 0.014, 2), (0.010, 0.002, 1), (0.030, 0.001, 2)],
)
def test_a_small_model_keeps_one_thread_unless_several_are_clearly_faster(
    several: float, one: float, kept: int
) -> None:
    def warm(seconds: float) -> WarmUp:
        return WarmUp([(0, 1, seconds / 10), (0, 8, seconds)])

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = with_fewer_threads(warm(several), lambda: warm(one if torch.get_num_threads() == 1 else 9.0))
        assert torch.get_num_threads() == kept
        assert found.curve[-1][2] == (one if kept == 1 else several)
    finally:
        torch.set_num_threads(before)
