"""`inference.compile: cudagraph` on the fake accelerator: captured once, largest first, replayed where it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forebay import Model, TensorSpec
from forebay.errors import ConfigError, ModelError
from forebay.inference.compilation import compiled
from forebay.inference.devices import Accelerator, open_device
from forebay.inference.devices.fake import FakeBackend
from forebay.inference.devices.fake_graphs import Tape
from forebay.inference.matching import finished
from forebay.inference.replica import begin_replica
from forebay.inference.staging import SlotSize, Staging
from tests.inference.models import Echo, Words
from tests.inference.test_loading import start
from tests.inference.test_runner import Bench, ids, numbers, ordinary


class Net(Model):
    """A small network that counts how often Python runs its forward."""

    inputs: Any = (TensorSpec("x", "FP32", [-1, 4]),)
    outputs: Any = (TensorSpec("y", "FP32", [-1]),)

    def load(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.calls = 0
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 1)).eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.net(x).squeeze(1)


class Two(Model):
    """Sums ragged rows, with a label beside the fraction, and writes into its input as some do."""

    inputs = (TensorSpec("ids", "INT64", [-1, -1], pad=0),)
    outputs = (TensorSpec("sum", "INT64", [-1]), TensorSpec("mean", "FP32", [-1]))

    def load(self, device: torch.device) -> None: ...

    def forward(self, ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
        real = (ids != 0).sum(1)
        total = ids.sum(1)
        ids.mul_(0)
        return {"mean": total / real, "sum": total}


def bench_of(model: Model, name: str = "fake", **changes: Any) -> tuple[Bench, FakeBackend]:
    """Return a bench whose graphs are captured and whose warm-up is over, and its device."""
    device = open_device(name)
    assert isinstance(device, Accelerator)
    assert isinstance(device.backend, FakeBackend)
    bench = Bench(model, device=device, compile="cudagraph", **changes)
    bench.warm_up()
    graphs = bench.runner.forward.compiled
    assert graphs is not None
    assert graphs.record()
    graphs.freeze()
    return bench, device.backend


def fallbacks(bench: Bench) -> int:
    assert bench.runner.forward.compiled is not None
    return bench.runner.forward.compiled.fallbacks


# ---------------------------------------------------------------------- what is refused


def test_a_cpu_has_no_graphs_and_nothing_else_is_taken_in_their_place() -> None:
    with pytest.raises(ConfigError, match=r"cudagraph needs a CUDA device, and inference\.device is cpu"):
        compiled(Net(), start(compile="cudagraph"), open_device("cpu"))
    staging = Staging(SlotSize(1 << 12, 1 << 12), 2)
    told, runner = begin_replica(
        start(factory="tests.inference.test_graphs:Net", search=[str(Path.cwd())], compile="cudagraph"), staging.map
    )
    assert runner is None
    assert "needs a CUDA device" in str(told)


def test_text_and_threads_are_refused_with_the_mend() -> None:
    with pytest.raises(ConfigError, match="Words has BYTES in forward: set"):
        compiled(Words(), start(compile="cudagraph"), open_device("fake"))
    with pytest.raises(ConfigError, match="executor process"):
        compiled(Net(), start(compile="cudagraph", sharing=2), open_device("fake"))


def test_a_forward_that_waits_for_the_device_stops_the_start_with_its_reason() -> None:
    def answer(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) if bool((x[:, 0] >= 0).all()) else x.mean(1)

    with pytest.raises(ModelError, match=r"cannot capture Echo: .*is_nonzero is not permitted.*or set inference"):
        bench_of(Echo(answer))


# ---------------------------------------------------------------------- capture and replay


def test_every_allowed_size_has_a_graph_and_the_largest_is_captured_first() -> None:
    bench, device = bench_of(Net(), limit=8, sizes=[1, 2, 4, 8])
    graphs: Any = bench.runner.forward.compiled
    assert [shape[0][2][0] for shape in graphs._graphs] == [8, 4, 2, 1]
    assert [event for event in device.trace if event.startswith("capture")] == [f"capture {n}" for n in (1, 2, 3, 4)]


def test_a_batch_is_a_replay_without_any_python_of_the_model() -> None:
    bench, device = bench_of(Net(), limit=8, sizes=[1, 2, 4, 8])
    calls = bench.model.calls  # type: ignore[attr-defined]
    expected = bench.model.net(torch.tensor([[float(n), 0, 0, 1] for n in range(8)])).squeeze(1)  # type: ignore[attr-defined]
    for size in (1, 2, 3, 5, 8, 7):
        answers = bench.run(*ordinary(size))
        for number in range(size):
            assert answers.floats(str(number))[0] == pytest.approx(float(expected[number]), abs=1e-6)
    assert bench.model.calls == calls  # type: ignore[attr-defined]
    assert [event for event in device.trace if event.startswith("replay")][-6:] == [
        "replay 4", "replay 3", "replay 2", "replay 1", "replay 1", "replay 1",
    ]  # fmt: skip
    assert fallbacks(bench) == 0


def test_two_batches_in_flight_do_not_overwrite_each_others_outputs() -> None:
    """A replay writes where the one before it wrote, whose results may still be on their way to the slot."""
    bench, _ = bench_of(Net(), "fake?ticks=7", limit=4, sizes=[4])
    expected = bench.model.net(torch.tensor([[float(n), 0, 0, 1] for n in range(4)])).squeeze(1)  # type: ignore[attr-defined]
    flights = [
        bench.runner.begin(bench.submit([numbers("a", 0, 1)])),
        bench.runner.begin(bench.submit([numbers("b", 2, 3)]), beside=True),
    ]
    found = [finished(bench.replica, bench.runner.finish(flight), 0.0).results[0][1][0].content for flight in flights]
    values = [torch.frombuffer(bytearray(raw), dtype=torch.float32) for raw in found]
    assert torch.allclose(torch.cat(values), expected, atol=1e-6)


def test_a_shape_without_a_graph_runs_uncompiled_is_right_and_counts() -> None:
    bench, _ = bench_of(Two(), limit=4, sizes=[2, 4], buckets=[4, 8])
    assert bench.run(ids("a", [1, 2, 3]), ids("b", [4])).ints("a") == [6]
    assert fallbacks(bench) == 0
    assert bench.run(ids("long", list(range(1, 21)))).ints("long") == [210]
    assert fallbacks(bench) == 1
    assert bench.timings[-1].recompiles == 1


def test_a_model_that_writes_into_its_input_is_replayed_with_the_next_ones() -> None:
    bench, _ = bench_of(Two(), limit=2, sizes=[2], buckets=[4])
    for first in range(1, 5):
        answers = bench.run(ids("a", [first, first]), ids("b", [7]))
        assert (answers.ints("a"), answers.ints("b")) == ([2 * first], [7])


def test_a_replica_without_allowed_sizes_captures_the_powers_of_two_and_measures_replays() -> None:
    staging = Staging(SlotSize(1 << 12, 1 << 12), 2)
    asked = start(
        factory="tests.inference.test_graphs:Net", search=[str(Path.cwd())], compile="cudagraph", device="fake",
        max_batch_size=8, slot_bytes=1 << 13, input_bytes=1 << 12,
    )  # fmt: skip
    told, runner = begin_replica(asked, staging.map)
    assert runner is not None, told
    assert [rows for _, rows, _ in told.curve] == [1, 2, 4, 8]  # type: ignore[union-attr]
    graphs: Any = runner.forward.compiled
    assert [shape[0][2][0] for shape in graphs._graphs] == [8, 4, 2, 1]
    assert told.compile == "cudagraph"  # type: ignore[union-attr]
    assert graphs.fallbacks == 0


# ---------------------------------------------------------------------- the fake itself


def test_a_tape_repeats_operations_on_their_own_tensors_and_no_python() -> None:
    source, asked = torch.tensor([1.0, 2.0]), []
    with Tape() as tape:
        asked.append("python")
        made = (source * 2)[:1] + 1
    assert made.tolist() == [3.0]
    source.copy_(torch.tensor([10.0, 20.0]))
    assert made.tolist() == [3.0]
    tape.replay()
    assert made.tolist() == [21.0]
    assert asked == ["python"]
