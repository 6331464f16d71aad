"""`inference.compile: aoti`: one package for every batch size, kept for later starts, its inputs checked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay import TensorSpec
from forebay.errors import ConfigError, ModelError
from forebay.inference import aoti
from forebay.inference.compilation import compiled
from forebay.inference.forwarding import Forward
from tests.inference.models import Echo, Words
from tests.inference.test_loading import start
from tests.inference.test_runner import Bench, numbers, ordinary
from tests.integration.test_compilation import Net, needs_a_compiler


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for all tests here: a compiler takes its time."""
    folder = tmp_path_factory.mktemp("cache")
    yield folder
    shutil.rmtree(folder)


def test_text_is_refused_with_the_mend() -> None:
    with pytest.raises(ConfigError, match=r"Words has BYTES in its forward: set inference\.compile to none"):
        compiled(Words(), start(compile="aoti"))


def test_threads_that_would_share_a_package_are_refused() -> None:
    with pytest.raises(ConfigError, match="executor process"):
        compiled(Net(), start(compile="aoti", sharing=2))


def test_a_forward_that_looks_into_its_numbers_stops_the_start_with_its_reason(tmp_path: Path) -> None:
    def answer(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) if bool(x[0, 0] > 0) else x.mean(1)

    bench = Bench(Echo(answer), compile="aoti", cache_dir=str(tmp_path))
    with pytest.raises(
        ModelError, match=r"^inference\.compile aoti: torch\.export cannot export Echo.*none or inductor"
    ):
        bench.warm_up()


def test_a_batch_of_one_row_runs_as_two() -> None:
    forward = Forward(Net(), start(compile="aoti"))
    assert [forward.size(rows) for rows in (1, 2, 3)] == [2, 2, 3]
    assert forward.limit(4) == 4


def test_an_example_has_no_two_dimensions_that_export_would_take_for_one() -> None:
    found = aoti._example({"x": torch.zeros(1, 2, 3)}, 8)
    assert found["x"].shape == (4, 2, 3)
    assert aoti._example({"x": torch.zeros(1, 2, 3)}, 3)["x"].shape == (2, 2, 3)


@needs_a_compiler
@pytest.mark.slow
def test_one_package_serves_every_size_and_the_next_start_finds_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(Net(), limit=16, compile="aoti", cache_dir=str(cache))
    assert [rows for _, rows, _ in bench.warm_up().curve] == [1, 2, 4, 8, 16]
    package = bench.runner.forward.compiled
    assert package is not None
    package.freeze()
    expected = bench.model.forward(torch.tensor([[float(n), 0, 0, 1] for n in range(16)]))
    for size in range(1, 17):
        answers = bench.run(*ordinary(size))
        assert answers.floats(str(size - 1))[0] == pytest.approx(float(expected[size - 1]), abs=1e-6)
    assert package.fallbacks == 0

    wide = torch.ones(3, 5)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # the model's own word, not the package's
        package(x=wide)
    double = torch.ones(17, 4)
    assert package(x=double).tolist() == pytest.approx(bench.model.forward(double).tolist(), abs=1e-6)
    assert package.fallbacks == 2
    bench.run(numbers("a", 1))
    assert bench.timings[-1].recompiles == 2

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", never)
    again = Bench(Net(), limit=16, compile="aoti", cache_dir=str(cache))
    again.warm_up()
    assert again.run(numbers("a", 3)).floats("a")[0] == pytest.approx(float(expected[3]), abs=1e-6)


@needs_a_compiler
@pytest.mark.slow
def test_other_weights_are_another_package_and_a_wrong_one_is_found_out(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(Net):
        def load(self, device: torch.device) -> None:
            super().load(device)
            self.net[0].bias.data += 1

    seen: list[str] = []
    monkeypatch.setattr(aoti, "_key", lambda *asked: seen.append(real(*asked)) or "same")
    for model in (Net(), Other()):
        bench = Bench(model, limit=4, compile="aoti", cache_dir=str(cache))
        if seen:
            with pytest.raises(ModelError, match="the package gives another y than the model"):
                bench.warm_up()
        else:
            bench.warm_up()
    assert len(set(seen)) == 2


real = aoti._key


@needs_a_compiler
@pytest.mark.slow
def test_ragged_rows_of_every_length_run_in_one_package(cache: Path) -> None:
    class Ragged(Net):
        inputs = (TensorSpec("ids", "INT64", [-1, -1], pad=0), TensorSpec("mask", "FP32", [-1, -1], pad=0))
        outputs = (TensorSpec("y", "FP32", [-1, 4]), TensorSpec("n", "INT64", [-1]))

        def load(self, device: torch.device) -> None:
            torch.manual_seed(0)
            self.table = torch.nn.Embedding(10, 4).eval().requires_grad_(False)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
            return {"n": (ids != 0).sum(1), "y": (self.table(ids) * mask.unsqueeze(-1)).sum(1)}

    model = Ragged()
    bench = Bench(model, limit=8, compile="aoti", cache_dir=str(cache), buckets=[4, 8])
    bench.warm_up()
    package = bench.runner.forward.compiled
    assert package is not None
    package.freeze()
    for rows, length in ((2, 3), (5, 8), (8, 40)):
        given = {"ids": torch.randint(0, 10, (rows, length)), "mask": torch.rand(rows, length)}
        one, other = package(**given), model.forward(**given)
        assert torch.equal(one["n"], other["n"])
        assert torch.allclose(one["y"], other["y"], atol=1e-5)
    assert package.fallbacks == 0
