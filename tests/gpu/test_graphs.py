"""CUDA graphs, and the precisions that only a GPU has: what the fake accelerator can only imitate."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from forebay import Model, TensorSpec
from forebay.errors import ModelError
from forebay.inference import precision
from forebay.inference.adoption import adopt
from forebay.inference.candidate import answer
from forebay.inference.devices import Accelerator, open_device
from forebay.inference.matching import finished
from forebay.inference.verdicts import CANDIDATES, Question
from tests.gpu.test_cuda import _unpinned, pinned  # noqa: F401
from tests.inference.test_loading import start
from tests.inference.test_runner import Bench, numbers, ordinary

CUDA = "cuda:0"


class Deep(Model):
    """Many small kernels, whose launches take longer than they do."""

    inputs = (TensorSpec("x", "FP32", [-1, 4]),)
    outputs = (TensorSpec("y", "FP32", [-1]),)

    def load(self, device: torch.device) -> None:
        torch.manual_seed(0)
        middle = [part for _ in range(20) for part in (nn.Linear(256, 256), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(4, 256), *middle, nn.Linear(256, 1)).eval().requires_grad_(False).to(device)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x).squeeze(1)


@pytest.fixture
def device() -> Iterator[Accelerator]:
    found = open_device(CUDA)
    assert isinstance(found, Accelerator)
    yield found
    gc.collect()
    torch.cuda.empty_cache()


def captured(model: Model, device: Accelerator, **changes: Any) -> Bench:
    bench = pinned(model, device, compile="cudagraph", **changes)
    bench.warm_up()
    graphs = bench.runner.forward.compiled
    assert graphs is not None
    assert graphs.record()
    graphs.freeze()
    return bench


def expected(bench: Bench, count: int) -> list[float]:
    rows = torch.tensor([[float(number), 0, 0, 1] for number in range(count)], device=CUDA)
    with torch.inference_mode():
        return bench.model.forward(rows).tolist()  # type: ignore[no-any-return]


def test_every_size_is_replayed_and_right(device: Accelerator) -> None:
    bench = captured(Deep(), device, limit=16, sizes=[1, 2, 4, 8, 16])
    wanted = expected(bench, 16)
    for size in (*range(1, 17), 3, 16, 1):
        answers = bench.run(*ordinary(size))
        assert [answers.floats(str(n))[0] for n in range(size)] == pytest.approx(wanted[:size], abs=1e-4)
    assert bench.runner.forward.compiled is not None
    assert bench.runner.forward.compiled.fallbacks == 0


def test_two_batches_in_flight_keep_their_own_outputs_and_nothing_waits(device: Accelerator) -> None:
    """Any synchronisation in a launch raises here."""
    bench = captured(Deep(), device, limit=4, sizes=[4])
    wanted = expected(bench, 4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flights = [
            bench.runner.begin(bench.submit([numbers("a", 0, 1)])),
            bench.runner.begin(bench.submit([numbers("b", 2, 3)]), beside=True),
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [finished(bench.replica, bench.runner.finish(flight), 0.0).results[0][1][0].content for flight in flights]
    assert [value for raw in found for value in np.frombuffer(raw, "<f4")] == pytest.approx(wanted, abs=1e-4)


def test_all_graphs_share_one_pool(device: Accelerator) -> None:
    """The smaller sizes take hardly more than the largest alone."""
    alone = captured(Deep(), device, limit=512, sizes=[512])
    one = torch.cuda.memory_reserved()
    del alone
    gc.collect()
    torch.cuda.empty_cache()
    captured(Deep(), device, limit=512, sizes=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    assert torch.cuda.memory_reserved() < 2 * one


def test_a_forward_that_waits_stops_the_start_with_its_reason(device: Accelerator) -> None:
    class Waits(Deep):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) if bool((x[:, 0] >= 0).all()) else x.sum(1)

    with pytest.raises(ModelError, match="cudagraph cannot capture Waits"):
        captured(Waits(), device, limit=2, sizes=[2])


@pytest.mark.parametrize("name", CANDIDATES[1:])
def test_every_precision_that_the_device_has_is_near_fp32(device: Accelerator, name: str) -> None:
    why = precision.refusal(name, device.device)
    if why is not None:
        pytest.skip(why)
    told = start(
        factory="tests.gpu.test_graphs:Deep", search=[str(Path.cwd())], device=CUDA, precision=name, max_batch_size=32
    )
    _, adopted = adopt(told, device)
    assert adopted.deviation is not None
    assert adopted.deviation < 0.2
    precision.set_matmul("fp32")


def test_two_of_four_weights_are_compressed_where_the_device_skips_zeros(device: Accelerator) -> None:
    if torch.cuda.get_device_capability(device.device) < (8, 0):
        pytest.skip("2:4 needs compute capability 8.0")
    told = start(factory="tests.gpu.test_graphs:Deep", search=[str(Path.cwd())], device=CUDA, precision="bf16")
    found = answer(Question(told, "2:4"))
    assert found.error == ""
    assert not any("dense kernels" in note for note in found.notes)
