"""torch.compile: what was compiled runs compiled, and what was not is an error or counted, never silent."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from forebay import Model, TensorSpec
from forebay.errors import ConfigError, ModelError
from forebay.inference import compilation
from forebay.inference.compilation import Compiled, thaw, variants
from tests.inference.test_loading import start
from tests.inference.test_runner import Bench, numbers, ordinary

needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor on the CPU needs a C++ compiler"
)


class Net(Model):
    """A small network."""

    inputs = (TensorSpec("x", "FP32", [-1, 4]),)
    outputs = (TensorSpec("y", "FP32", [-1]),)

    def load(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x).squeeze(1)


@pytest.fixture(autouse=True)
def stance() -> Iterator[None]:
    """Leave torch's compiler as it was found: the stance holds for the whole process."""
    config: Any = torch._dynamo.config
    before = (config.recompile_limit, config.accumulated_recompile_limit, config.fail_on_recompile_limit_hit)
    yield
    config.recompile_limit, config.accumulated_recompile_limit, config.fail_on_recompile_limit_hit = before
    thaw()
    torch._dynamo.reset()


def test_the_limit_has_room_for_every_shape_that_is_allowed() -> None:
    assert variants(start(sizes=[1, 2, 4, 8], buckets=[16, 32, 64])) >= 12
    assert variants(start(max_batch_size=512)) >= 10


def test_a_mode_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="none, inductor, aoti or cudagraph"):
        Compiled(lambda: None, start(compile="magic"))


@needs_a_compiler
@pytest.mark.slow
def test_after_the_warm_up_no_size_is_compiled_again_and_another_shape_is_counted() -> None:
    """S26: 1,000 random sizes and no recompilation. Then a shape that no warm-up saw: right, and counted."""
    bench = Bench(Net(), limit=32, compile="inductor")
    bench.warm_up()
    compiled = bench.runner.forward.compiled
    assert compiled is not None
    compiled.freeze()
    expected = bench.model.forward(torch.tensor([[float(n), 0, 0, 1] for n in range(32)]))
    for size in np.random.default_rng(0).integers(1, 33, 1_000):
        answers = bench.run(*ordinary(int(size)))
        assert answers.floats(str(size - 1))[0] == pytest.approx(float(expected[size - 1]), abs=1e-6)
    assert compiled.fallbacks == 0
    assert sum(timing.recompiles for timing in bench.timings) == 0

    strange = torch.ones(2, 4, dtype=torch.float64).float().t().contiguous().t()
    assert compiled(x=strange).tolist() == pytest.approx(bench.model.forward(strange).tolist(), abs=1e-6)
    assert compiled.fallbacks == 1
    bench.run(numbers("a", 1))
    assert bench.timings[-1].recompiles == 1


@needs_a_compiler
@pytest.mark.slow
def test_more_variants_than_the_limit_stop_the_start_and_nothing_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "variants", lambda _: 1)
    bench = Bench(Net(), limit=4, compile="inductor")
    with pytest.raises(ModelError, match="inductor cannot compile the model"):
        bench.warm_up()
