"""The CUDA device under the runner: streams, no hidden waits, memory that runs out, and a device that is lost.

The fake accelerator shows the order of things on any machine; here is what only a GPU can show.
"""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

from forebay import Model, TensorSpec
from forebay.errors import ModelError
from forebay.inference.devices import Accelerator, open_device
from forebay.inference.matching import finished
from forebay.inference.precision import set_matmul
from forebay.inference.selfcheck import self_check
from forebay.records import Code
from tests.inference.models import Padded, Prepared, Words
from tests.inference.test_runner import Bench, check_innocents, ids, lines, numbers, ordinary
from tests.unit.builders import request

ROOT = Path(__file__).resolve().parents[2]
PINNED: list[tuple[Accelerator, mmap.mmap]] = []


class OnDevice(Model):
    """The sum of a row after a few large products, all of it on the device and without waiting for it."""

    inputs = (TensorSpec("x", "FP32", [-1, 4]),)
    outputs = (TensorSpec("y", "FP32", [-1]),)

    def __init__(self, products: int = 0, width: int = 4_096) -> None:
        self.products = products
        self.width = width

    def load(self, device: torch.device) -> None:
        self.work = torch.eye(self.width, device=device)

    def forward(self, x: torch.Tensor) -> Any:
        work = self.work
        for _ in range(self.products):
            work = work @ self.work
        return x.sum(1) + 0 * work[0, 1]


class Hungry(OnDevice):
    """Takes a gibibyte per row."""

    def forward(self, x: torch.Tensor) -> Any:
        memory = torch.zeros(len(x), 2**30, dtype=torch.uint8, device=x.device)
        return x.sum(1) + memory[:, 0]


@pytest.fixture
def device() -> Iterator[Accelerator]:
    found = open_device("cuda:0")
    assert isinstance(found, Accelerator)
    yield found
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture(autouse=True)
def _unpinned() -> Iterator[None]:
    """Unlock what a test has page-locked before it is unmapped: else whatever is mapped there next cannot be locked."""
    yield
    while PINNED:
        accelerator, memory = PINNED.pop()
        accelerator.settle()
        accelerator.unpin(memory)


def pinned(model: Model, device: Accelerator, **changes: Any) -> Bench:
    bench = Bench(model, device=device, **changes)
    assert device.pin(bench.staging.map) is None
    PINNED.append((device, bench.staging.map))
    device.settle()
    return bench


def test_every_request_gets_its_own_rows(device: Accelerator) -> None:
    bench = pinned(OnDevice(products=2), device)
    for turn in range(50):
        answers = bench.run(numbers("a", turn), numbers("b", 2, 3, 4), numbers("c", 5))
        assert [answers.floats(name) for name in "abc"] == [[turn + 1], [3, 4, 5], [6]]


def test_text_padding_and_prepare_come_through(device: Accelerator) -> None:
    answers = pinned(Padded(), device).run(ids("a", [1, 2]), ids("b", [3, 4, 5]))
    assert (answers.ints("a"), answers.ints("b")) == ([1, 2, -1], [3, 4, 5])
    answers = pinned(Prepared(), device).run(lines("a", b"1 2 3"), lines("bad", b"one"), lines("c", b"3"))
    assert (answers.ints("a"), answers.ints("c"), set(answers.failures)) == ([6], [3], {"bad"})
    content = np.arange(3, dtype="<i8").tobytes()
    words = request("w", rows=3, tensors=[[b"a", b"b", b"c"], content], shapes=[(3,), (3,)])
    answers = pinned(Words(), device).run(words)
    assert answers.results["w"] == [[b"", b"b", b"cc"], np.array([0, 2, 4], "<i8").tobytes()]


def test_guilty_requests_are_found_and_the_others_get_their_results(device: Accelerator) -> None:
    class Fails(OnDevice):
        def forward(self, x: torch.Tensor) -> Any:
            if bool((x[:, 0] == 11).any()):
                raise ValueError("poison")
            return torch.where(x[:, 0] == 20, float("nan"), x.sum(1))

    answers = pinned(Fails(), device).run(*ordinary(32))
    check_innocents(answers, 32, {11, 20})
    assert answers.failures["20"].code is Code.NON_FINITE_OUTPUT


def test_a_batch_is_launched_without_waiting_for_the_device(device: Accelerator) -> None:
    """Any synchronisation in the launch of a batch, ours or hidden in an operation, raises here."""
    bench = pinned(OnDevice(products=4), device)
    bench.warm_up()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flights = [bench.runner.begin(bench.submit([numbers("a", number)]), beside=number > 0) for number in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    values = []
    for flight in flights:
        back = finished(bench.replica, bench.runner.finish(flight), 0.0)
        values.append(np.frombuffer(back.results[0][1][0].content, "<f4").tolist())
    assert values == [[1], [2]]


def test_the_next_batch_is_launched_while_the_one_before_it_computes(device: Accelerator) -> None:
    bench = pinned(OnDevice(products=200), device)
    bench.runner.run(bench.submit(ordinary(1)))
    bench.replica.running.clear()
    bench.staging.reset()
    first = bench.runner.begin(bench.submit([numbers("a", 1)]))
    second = bench.runner.begin(bench.submit([numbers("b", 2)]), beside=True)
    assert not bench.runner.is_done(first)
    for flight in (first, second):
        assert finished(bench.replica, bench.runner.finish(flight), 0.0).failures == []


def test_a_compiled_package_does_not_hold_up_the_launch_of_the_next_batch(device: Accelerator, tmp_path: Path) -> None:
    """A package with one runner begins a batch only when the one before has ended, and waits for that."""
    bench = pinned(OnDevice(products=200), device, limit=4, compile="aoti", cache_dir=str(tmp_path))
    bench.warm_up()
    flights = [bench.runner.begin(bench.submit([numbers("a", number)]), beside=number > 0) for number in range(2)]
    assert not bench.runner.is_done(flights[0])
    values = []
    for flight in flights:
        back = finished(bench.replica, bench.runner.finish(flight), 0.0)
        values.append(np.frombuffer(back.results[0][1][0].content, "<f4").tolist())
    assert values == [[1], [2]]


def test_what_a_failed_forward_has_launched_spoils_no_retry(device: Accelerator) -> None:
    """Its kernels write into memory that the allocator gives to the retry at once."""

    class WritesLate(OnDevice):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            if len(x) > 1:
                x.mul_(0).add_(y[0] * 0 + 7)  # behind the products
                raise ValueError("only alone")
            return y

    bench = pinned(WritesLate(products=30), device)
    for _ in range(5):
        check_innocents(bench.run(*ordinary(8)), 8, set())


def test_memory_that_cannot_be_page_locked_is_a_note_and_no_error_of_the_next_kernel(device: Accelerator) -> None:
    bench = pinned(OnDevice(), device)
    again = open_device("cuda:0")
    assert "not page-locked" in (again.pin(bench.staging.map) or "")  # it is already
    assert torch.ones(4, device=device.device).sum().item() == 4
    bench.runner.close()
    assert device.pin(bench.staging.map) is None


def test_a_model_that_turns_tf32_on_in_the_new_words_is_understood(device: Accelerator) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert device.tolerance("fp32") > 1e-4
    finally:
        set_matmul("fp32")


def test_memory_that_runs_out_is_learnt_once_and_given_back(device: Accelerator) -> None:
    total = device.memory()["device_total"]
    torch.cuda.set_per_process_memory_fraction(min(20 * 2**30 / total, 0.8))
    bench = pinned(Hungry(), device)
    answers = bench.run(*ordinary(32))
    check_innocents(answers, 32, set())
    assert answers.executions >= 3
    answers = bench.run(*ordinary(32))
    assert answers.executions == -(-32 // bench.timings[-1].cap)  # type: ignore[operator]
    assert torch.cuda.memory_allocated() < 2**30


def test_peaks_and_figures_are_the_allocators(device: Accelerator) -> None:
    bench = pinned(Hungry(), device, limit=2)
    found = bench.warm_up()
    assert [rows for _, rows, _ in found.peaks] == [1, 2]
    assert all(rows * 2**30 <= size < (rows + 1) * 2**30 for _, rows, size in found.peaks)
    assert {"allocated", "reserved", "device_used", "device_total"} <= set(device.memory())


def test_batches_go_by_the_measured_peaks_and_never_run_out_of_memory_after_the_warm_up() -> None:
    total = torch.cuda.mem_get_info()[1]
    share = open_device("cuda:0", min(20 * 2**30 / total, 0.8))
    assert isinstance(share, Accelerator)
    try:
        bench = pinned(Hungry(), share, limit=32)
        bench.warm_up()
        before = torch.cuda.memory_stats()["num_ooms"]
        assert before, "the warm-up fitted whole, so the test says nothing"
        for count in (32, 5, 17, 32):
            check_innocents(bench.run(*ordinary(count)), count, set())
        assert torch.cuda.memory_stats()["num_ooms"] == before
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_share_of_the_device_is_all_that_there_is() -> None:
    share = open_device("cuda:0", 0.01)
    try:
        limit = share.memory()["device_total"] // 100
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * limit, dtype=torch.uint8, device=share.device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_rows_that_influence_each_other_are_refused(device: Accelerator) -> None:
    class Mixes(OnDevice):
        def forward(self, x: torch.Tensor) -> Any:
            return x.sum(1) - x.mean()

    for model, is_sound in ((OnDevice(), True), (Mixes(), False)):
        bench = pinned(model, device)
        if is_sound:
            assert self_check(bench.runner, model, bench.start, device.tolerance("fp32")).compared
        else:
            with pytest.raises(ModelError, match="influence each other"):
                self_check(bench.runner, model, bench.start, device.tolerance("fp32"))


LOST = """
    import torch
    from forebay.inference.example import DeviceLost
    from tests.gpu.test_cuda import OnDevice, open_device, pinned
    from tests.inference.test_runner import ordinary

    class Asserts(OnDevice):
        def forward(self, x):
            torch.ones(4, device=x.device)[(x[:, 0] * 100).long()]
            return x.sum(1)

    bench = pinned(Asserts(), open_device("cuda:0"))
    for _ in range(2):
        try:
            bench.run(*ordinary(4))
        except DeviceLost as error:
            print("lost:", error, flush=True)
    import os
    os._exit(75)
"""


def test_a_device_side_assert_loses_the_device_and_nothing_else_is_made_of_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", dedent(LOST)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 75, done.stderr[-2_000:]
    assert done.stdout.count("lost:") == 2, done.stdout + done.stderr[-2_000:]
