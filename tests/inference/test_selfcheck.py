"""The self-check at the start: models that mix their rows are refused, and no other one is."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from forebay import Model, TensorSpec
from forebay.errors import ModelError
from forebay.inference.devices import open_device
from forebay.inference.samples import distinct_rows
from forebay.inference.selfcheck import SelfCheck, self_check
from tests.inference.models import Echo, Padded, Prepared, Sums, Words
from tests.inference.test_runner import Bench

VECTOR = (TensorSpec("x", "FP32", [-1, 8]),)
SCORES = (TensorSpec("y", "FP32", [-1, 8]),)
IDS = (TensorSpec("ids", "INT64", [-1, -1], pad=0),)


class Net(Model):
    """A perceptron, with whatever a test puts in its way."""

    inputs = VECTOR
    outputs = SCORES

    def load(self, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)]
        self.net = nn.Sequential(*layers).eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


def checked(model: Model, limit: int = 32, **changes: Any) -> SelfCheck:
    bench = Bench(model, limit=limit, **changes)
    if bench.device.overlaps:
        bench.start.device = "fake"
    return self_check(bench.runner, model, bench.start, bench.device.tolerance(bench.start.precision))


# ---------------------------------------------------------------------- what passes


@pytest.mark.parametrize("model", [Sums(), Padded(), Net(), Prepared(), Echo(lambda x: x.sum(1))])
def test_a_model_that_keeps_its_rows_apart_passes(model: Model) -> None:
    found = checked(model)
    assert found.compared
    assert found.difference <= 1e-5
    assert found.notes == []


def test_the_largest_difference_is_what_is_published() -> None:
    class Nearly(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * (1 + 1e-6 * len(x))

    assert 1e-6 < checked(Nearly()).difference < 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_lower_precision_may_differ_more(precision: str) -> None:
    class Nearly(Net):
        def load(self, device: torch.device) -> None:
            super().load(device)
            self.net.to({"bf16": torch.bfloat16, "fp16": torch.float16}[precision])

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).float() * (1 + 1e-3 * (len(x) > 1))

    assert checked(Nearly(), precision=precision).difference > 1e-4


def test_a_model_that_computes_in_less_than_fp32_by_itself_may_differ_as_much() -> None:
    class Half(Net):
        def load(self, device: torch.device) -> None:
            super().load(device)
            self.net.bfloat16()

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x.bfloat16()).float() * (1 + 1e-3 * (len(x) > 1))

    assert checked(Half()).difference > 1e-4


def test_outputs_that_are_not_a_number_agree_with_themselves() -> None:
    assert checked(Echo(lambda x: torch.log(-x.sum(1)))).difference == 0.0


def test_a_batch_of_one_row_has_nothing_to_be_compared_with() -> None:
    def mean(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) - x.mean()

    assert checked(Echo(mean), limit=1).difference == 0.0


def test_rounded_bytes_may_be_one_apart() -> None:
    def pixels(x: torch.Tensor) -> torch.Tensor:
        return (x.sum(1) * 10).to(torch.uint8) + (len(x) > 1)

    assert checked(Echo(pixels, TensorSpec("y", "UINT8", [-1]))).difference == 0.0


# ---------------------------------------------------------------------- ties and quantised numbers


def a_tie(x: torch.Tensor, influence: Any) -> torch.Tensor:
    """Return labels of which that of the first row of the self-check is decided by its last bits."""
    edge = float(distinct_rows(Echo(lambda y: y), 4)[0]["x"][0, 0])
    return (x[:, 0].double() + influence(x) > edge).long()


LABEL = TensorSpec("label", "INT64", [-1])


def test_a_label_near_a_tie_that_a_batchs_size_flips_is_noted_and_not_refused() -> None:
    """A model that gives labels alone was refused where one row was near a tie, which in 16 bits is not rare."""
    found = checked(Echo(lambda x: a_tie(x, lambda y: 1e-6 * (len(y) > 1)), LABEL))
    assert found.notes == ["1 of 4 rows give another answer in a batch than alone, as near a tie: rounding decides"]
    assert found.compared


def test_a_label_that_the_neighbours_flip_is_refused_even_if_it_is_one_of_many() -> None:
    def spread(x: torch.Tensor) -> Any:
        return 1e-6 * bool((x != x[:1]).any())

    with pytest.raises(ModelError, match="influence each other"):
        checked(Echo(lambda x: a_tie(x, spread), LABEL))


def test_labels_that_all_depend_on_a_batchs_size_are_refused() -> None:
    with pytest.raises(ModelError, match="influence each other"):
        checked(Echo(lambda x: torch.full((len(x),), len(x)), LABEL))


def test_where_too_few_rows_tell_more_are_asked() -> None:
    """Two of the first four rows are near a tie, and only these of all sixteen."""
    ties = torch.stack([row["x"][0, 0] for row in distinct_rows(Echo(lambda y: y), 4)[:2]]).double()

    def answer(x: torch.Tensor) -> torch.Tensor:
        near = (x[:, 0].double()[:, None] == ties).any(1)
        return (near & (len(x) > 1)).long()

    found = checked(Echo(answer, LABEL))
    assert found.notes == ["2 of 16 rows give another answer in a batch than alone, as near a tie: rounding decides"]
    with pytest.raises(ModelError, match="influence each other"):
        checked(Echo(answer, LABEL), limit=4)


def test_a_label_near_a_tie_that_padding_flips_is_noted() -> None:
    class Counts(Model):
        inputs = IDS
        outputs = (LABEL,)

        def forward(self, ids: torch.Tensor) -> Any:
            real = (ids != 0).sum(1)
            return real + (real == 8) * (ids.shape[1] > 8)

        def example(self) -> Mapping[str, Any]:
            return {"ids": torch.ones(1, 16, dtype=torch.long)}

    found = checked(Counts(), limit=4)
    assert found.notes[0] == "1 of 4 rows give another answer padded than alone, as near a tie: rounding decides"


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantisation_whose_scale_is_the_whole_batchs_is_not_refused(labels: bool) -> None:
    """It was: a neighbour moves the scale, and with it every row by about a step of 8 bits."""

    class Quantised(Net):
        outputs = (LABEL,) if labels else SCORES

        def load(self, device: torch.device) -> None:
            super().load(device)
            self.net = torch.ao.quantization.quantize_dynamic(self.net, {nn.Linear}, dtype=torch.qint8)

        def forward(self, x: torch.Tensor) -> Any:
            scores = super().forward(x)
            return scores.argmax(1) if labels else scores

    found = checked(Quantised())
    assert found.compared
    assert found.difference <= 5e-2


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantised_model_that_mixes_its_rows_is_refused_all_the_same() -> None:
    class Mixed(Net):
        def load(self, device: torch.device) -> None:
            super().load(device)
            self.net = torch.ao.quantization.quantize_dynamic(self.net, {nn.Linear}, dtype=torch.qint8)

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x - x.mean(0))

    with pytest.raises(ModelError, match="influence each other"):
        checked(Mixed())


# ---------------------------------------------------------------------- what is refused


def batch_mean(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1) - x.mean()


def batch_softmax(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1).softmax(0)


def first_row(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1) + 1e-3 * x[0, 0]


@pytest.mark.parametrize("answer", [batch_mean, batch_softmax, first_row])
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_rows_that_influence_each_other_are_refused_with_the_mend(answer: Any, device: str) -> None:
    with pytest.raises(ModelError, match=r"rows influence each other.*differ by.*batch\.max_batch_size to 1"):
        checked(Echo(answer), device=open_device(device))


def test_batch_statistics_are_found_out_even_in_eval_mode() -> None:
    class Normalised(Net):
        def load(self, device: torch.device) -> None:
            super().load(device)
            self.net.append(nn.BatchNorm1d(8, track_running_stats=False).eval())

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) if len(x) > 1 else self.net[:-1](x)

    with pytest.raises(ModelError, match="influence each other"):
        checked(Normalised())


def test_a_label_that_depends_on_the_neighbours_is_refused() -> None:
    labels = TensorSpec("label", "BYTES", [-1])
    with pytest.raises(ModelError, match="influence each other"):
        checked(Echo(lambda x: [b"%d" % rank for rank in x.sum(1).argsort().tolist()], labels))
    with pytest.raises(ModelError, match="influence each other"):
        checked(Echo(lambda x: x.sum(1).argsort(), TensorSpec("y", "INT64", [-1])))


class Embedder(Model):
    """The mean over a row's ids; with `masked` padding does not count."""

    inputs = IDS
    outputs = (TensorSpec("y", "FP32", [-1, 4]),)

    def __init__(self, masked: bool) -> None:
        self.masked = masked

    def load(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4).requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> Any:
        mask = (ids != 0).unsqueeze(-1).float() if self.masked else torch.ones(*ids.shape, 1)
        return (self.table(ids) * mask).sum(1) / mask.sum(1)


def test_padding_that_is_not_masked_is_refused_with_the_mend() -> None:
    assert checked(Embedder(masked=True)).difference <= 1e-5
    with pytest.raises(ModelError, match=r"when it is padded.*mask ids where it is 0.*inference\.self_check"):
        checked(Embedder(masked=False))


def test_explicit_buckets_pad_every_row_so_the_next_bucket_is_compared() -> None:
    with pytest.raises(ModelError, match="when it is padded"):
        checked(Embedder(masked=False), buckets=[16, 64])
    assert checked(Embedder(masked=True), buckets=[16, 64]).difference <= 1e-5


def test_a_model_that_fails_with_other_rows_beside_it_is_refused() -> None:
    def answer(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1 and bool((x[0] != x[1]).any()):
            raise ValueError("one at a time")
        return x.sum(1)

    with pytest.raises(ModelError, match=r"failed its self-check: ValueError: one at a time.*inference\.self_check"):
        checked(Echo(answer))


# ---------------------------------------------------------------------- chance and state


def test_a_model_that_draws_at_random_is_told_apart_and_noted() -> None:
    """Dropout at inference may be meant: such a model gives other outputs for the very same batch."""
    found = checked(Echo(lambda x: x.sum(1) + torch.rand(len(x))))
    assert "not deterministic" in found.notes[0]
    assert found.difference > 1e-3


class Counts(Net):
    """Adds the number of its calls, in a buffer of a module."""

    def load(self, device: torch.device) -> None:
        super().load(device)
        self.net.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        self.net.get_buffer("calls").add_(1)
        return super().forward(x)


class Remembers(Net):
    """Keeps its last batch, as a cache does."""

    def forward(self, x: torch.Tensor) -> Any:
        self.last = x
        return super().forward(x)


@pytest.mark.parametrize(("model", "what"), [(Counts(), "calls"), (Remembers(), "last")])
def test_state_between_calls_is_refused_for_several_threads_and_for_no_process(model: Model, what: str) -> None:
    assert checked(model).notes == []
    with pytest.raises(ModelError, match=f"keeps state.*{what}.*inference.executor to process"):
        checked(model, sharing=2)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_model_without_state_may_be_shared_by_threads(device: str) -> None:
    assert checked(Net(), sharing=2, device=open_device(device)).difference <= 1e-5


def test_threads_that_disturb_each_other_are_found_out() -> None:
    """No tensor and no number of the model changes; what it does depends on who else is in it."""

    class Crowded(Net):
        def load(self, device: torch.device) -> None:
            super().load(device)
            self.inside: set[int] = set()
            self.met = threading.Barrier(4)

        def forward(self, x: torch.Tensor) -> Any:
            self.inside.add(threading.get_ident())
            if threading.current_thread().name.startswith("forebay-self-check"):
                self.met.wait(60)
            return super().forward(x) * len(self.inside)

    with pytest.raises(ModelError, match="4 threads"):
        checked(Crowded(), sharing=2)


# ---------------------------------------------------------------------- rows to compare


def test_text_without_an_example_is_not_checked_and_that_is_noted() -> None:
    found = checked(Words())
    assert not found.compared
    assert "example()" in found.notes[0]


def test_text_is_checked_with_the_rows_of_the_example() -> None:
    class Said(Words):
        def example(self) -> Mapping[str, Any]:
            return {"text": [b"a", b"b", b"c"], "n": [1, 2, 3]}

    class Mixes(Said):
        def forward(self, text: list[bytes], n: torch.Tensor) -> Any:
            return {"said": [text[0]] * len(text), "twice": n * 2}

    assert checked(Said()).compared
    with pytest.raises(ModelError, match="influence each other"):
        checked(Mixes())


def test_an_example_is_varied_within_its_own_numbers() -> None:
    seen: list[torch.Tensor] = []

    class Looks(Embedder):
        def forward(self, ids: torch.Tensor) -> Any:
            seen.append(ids.unique())
            return super().forward(ids)

        def example(self) -> Mapping[str, Any]:
            return {"ids": [[3, 1, 4, 1, 5, 9, 2, 6]]}

    assert checked(Looks(masked=True)).difference <= 1e-5
    assert {int(number) for numbers in seen for number in numbers} <= {0, 1, 2, 3, 4, 5, 6, 9}
    with pytest.raises(ModelError, match="padded"):
        checked(Looks(masked=False))


def test_whole_numbers_of_an_example_stay_in_their_columns() -> None:
    """Columns changed places: an index of a large table in a small one is refused by a CPU and ends a CUDA device."""
    tables = [2, 50, 1_000]

    class Columns(Model):
        inputs = (TensorSpec("codes", "INT64", [-1, 3]),)
        outputs = (TensorSpec("y", "FP32", [-1]),)

        def load(self, device: torch.device) -> None:
            torch.manual_seed(0)
            self.seen: set[tuple[int, ...]] = set()
            self.tables = nn.ModuleList(nn.Embedding(size, 1).requires_grad_(False) for size in tables)

        def forward(self, codes: torch.Tensor) -> Any:
            self.seen |= {tuple(row) for row in codes.tolist()}
            return sum(table(codes[:, index]) for index, table in enumerate(self.tables)).squeeze(1)  # type: ignore[union-attr]

        def example(self) -> Mapping[str, Any]:
            return {"codes": [[1, 49, 999]]}

    model = Columns()
    assert checked(model).notes == []
    assert len(model.seen) > 1


def test_no_row_is_longer_than_what_the_warm_up_ran() -> None:
    """A row was padded to twice its length: a model with 8 positions was not checked, on a CUDA device it was lost."""
    seen: set[int] = set()

    class Positions(Embedder):
        def forward(self, ids: torch.Tensor) -> Any:
            seen.add(ids.shape[1])
            return super().forward(ids)

        def example(self) -> Mapping[str, Any]:
            return {"ids": [[3, 1, 4, 1, 5, 9, 2, 6]]}

    assert checked(Positions(masked=True)).notes == []
    assert max(seen) == 8
    assert checked(Positions(masked=True), buckets=[4, 16]).notes == []
    assert max(seen) == 16


def test_numbers_without_an_example_never_leave_the_smallest_table() -> None:
    class Table(Model):
        inputs = (TensorSpec("index", "INT32", [-1]),)
        outputs = (TensorSpec("y", "FP32", [-1, 2]),)

        def load(self, device: torch.device) -> None:
            self.table = nn.Embedding(2, 2).requires_grad_(False)

        def forward(self, index: torch.Tensor) -> Any:
            return self.table(index)

    assert checked(Table()).notes == []


def test_a_model_that_refuses_unknown_rows_is_compared_with_copies_of_one() -> None:
    def answer(x: torch.Tensor) -> torch.Tensor:
        if bool(x.any()):
            raise ValueError("zeros only")
        return x.sum(1)

    found = checked(Echo(answer))
    assert found.compared
    assert "let example() return several rows" in found.notes[0]


def test_forward_has_no_gradient_and_runs_in_inference_mode_in_every_thread() -> None:
    modes: set[tuple[bool, bool, bool]] = set()

    class Asks(Net):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            modes.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), y.requires_grad))
            return y

    checked(Asks(), sharing=2)
    assert modes == {(True, False, False)}
