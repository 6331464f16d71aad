"""What a device keeps doing, or keeps, after something failed on it: seen on the fake accelerator, without a GPU."""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forebay.inference import aoti
from forebay.inference.devices import is_out_of_memory, is_sticky
from forebay.inference.devices.cuda import CudaBackend, _nvml_handle
from forebay.inference.devices.fake import FakeBackend, FakeOptions
from forebay.inference.golden import golden
from forebay.inference.messages import Ready, Start, decode_to_loop, encode
from forebay.inference.precision import set_matmul, uses_tf32
from forebay.inference.replica import serve
from forebay.inference.staging import create_memory
from forebay.inference.transports import ThreadTransport
from forebay.inference.trials import try_out
from forebay.records import Code
from tests.inference.models import Echo, Sums
from tests.inference.test_accelerator import accelerator, traced
from tests.inference.test_runner import Bench, check_innocents, numbers, ordinary
from tests.unit.marks import POISON

OUTSIDE = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"


# ---------------------------------------------------------------------- what a failed forward has left behind


@pytest.mark.parametrize("options", ["ticks=50", "ticks=50&pin=no"])
def test_what_a_failed_forward_has_launched_spoils_no_retry(options: str) -> None:
    """The allocator gave the failed batch's memory to the retry, whose copy did not wait for the compute stream."""
    bench = Bench(Sums(), device=accelerator(options))
    for _ in range(3):
        answers = bench.run(*ordinary(8, {3: POISON}))
        check_innocents(answers, 8, {3})
    assert answers.failures["3"].code is Code.MODEL_ERROR


def test_a_trial_that_fails_spoils_no_other_one() -> None:
    bench = Bench(Sums(), device=accelerator("ticks=50"))
    with pytest.raises(ValueError, match="poison"):
        bench.runner.trial({"x": torch.full((1, 4), POISON)}, 1)
    assert bench.runner.trial({"x": torch.ones(1, 4)}, 1)[0].tolist() == [4.0]


@pytest.mark.parametrize("waits", [True, False])
def test_the_fake_shows_a_copy_that_does_not_wait_for_what_a_failed_forward_left(waits: bool) -> None:
    backend = FakeBackend(FakeOptions(ticks=10))
    incoming, compute = backend.stream(), backend.stream()
    with pytest.raises(ValueError, match="halfway"), backend.computing(compute):
        raise ValueError("halfway")
    if waits:
        left = backend.event()
        left.record(compute)
        incoming.wait_event(left)
    with backend.on(incoming):
        there = backend.fetch(torch.ones(4))
    backend.settle()
    assert torch.equal(there, torch.ones(4)) is waits


# ---------------------------------------------------------------------- memory


def test_memory_that_is_short_outside_of_the_allocator_loses_no_device() -> None:
    """CUDA's own out of memory is an AcceleratorError, which was taken for a device that is lost."""
    error = torch.AcceleratorError(OUTSIDE)  # type: ignore[attr-defined]
    assert is_out_of_memory(error)
    assert not is_sticky(error)
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_sticky(torch.AcceleratorError("CUDA error: device-side assert triggered"))  # type: ignore[attr-defined]
    assert not is_out_of_memory(ValueError("CUDA error: out of memory"))

    def answer(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            raise torch.AcceleratorError(OUTSIDE)  # type: ignore[attr-defined]
        return x.sum(1)

    device = accelerator()
    bench = Bench(Echo(answer), device=device)
    check_innocents(bench.run(*ordinary(16)), 16, set())
    assert "empty_cache" in traced(device)
    assert bench.timings[-1].cap == 4


def test_requests_that_are_refused_empty_no_cache() -> None:
    """Emptying it waits for the device, and the next batch has to ask the driver for memory again."""
    device = accelerator()
    bench = Bench(Sums(), device=device)
    bench.warm_up()
    for turn in range(3):
        assert set(bench.run(numbers(f"bad {turn}", POISON)).failures) == {f"bad {turn}"}
    assert "empty_cache" not in traced(device)


# ---------------------------------------------------------------------- order and what is let go


def test_trials_wait_for_what_converted_the_model() -> None:
    """Conversion runs on torch's default stream, for which the streams of a trial do not wait."""
    device, order = accelerator(), []
    model = Sums()
    model.load(device.device)
    known = golden(model, device.device, 4)
    settle, upload = device.settle, device.upload
    device.settle = lambda: (order.append("settle"), settle())[1]  # type: ignore[method-assign,func-returns-value]
    device.upload = lambda staged: (order.append("upload"), upload(staged))[1]  # type: ignore[method-assign,func-returns-value]
    assert try_out(model, device, Bench(Sums(), limit=4).start, known).full_seconds > 0
    assert order[:2] == ["settle", "upload"]


def told(device: str, memory: int) -> Start:
    return Start(
        "m", "1", "tests.inference.models:Sums", None, None, {}, device, "fp32", None, 4,
        memory // 2, memory // 4, 2, [],
        self_check=False,
    )  # fmt: skip


def test_a_replica_that_is_done_lets_go_of_the_page_locked_memory(tmp_path: Path) -> None:
    """As a thread it shares the worker's process: what is mapped there later could not be page-locked any more."""
    trace, size = tmp_path / "trace", 1 << 20
    memory = mmap.mmap(create_memory(size), size)
    transport = ThreadTransport(memory)
    transport.launch()
    transport.send(encode(told(f"fake:0?trace={trace}", size)))
    while (raw := transport.receive()) is None or not isinstance(decode_to_loop(raw), Ready):
        threading.Event().wait(0.01)
    assert "unpin" not in trace.read_text().splitlines()
    transport.stop()
    assert trace.read_text().splitlines()[-1] == "unpin"


def test_a_replica_that_cannot_start_lets_go_of_it_too(tmp_path: Path) -> None:
    trace, size = tmp_path / "trace", 1 << 20
    ours, theirs = Pipe()
    start = told(f"fake:0?trace={trace}", size)
    start.factory = "tests.inference.models:Nobody"
    ours.send_bytes(encode(start))
    assert serve(theirs, mmap.mmap(create_memory(size), size)) == 1
    assert trace.read_text().splitlines() == ["unpin"]


class Cudart:
    """The two calls of CUDA's runtime that lock pages; it refuses what is locked already, as that does."""

    def __init__(self) -> None:
        self.locked: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if address in self.locked:
            return 712
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0


def test_cuda_unlocks_what_it_has_locked_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, memory = Cudart(), mmap.mmap(create_memory(4096), 4096)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    one, other = (CudaBackend.__new__(CudaBackend) for _ in range(2))
    for backend in (one, other):
        backend._pinned, backend.device = set(), torch.device("cpu")
    assert one.pin(memory) is None
    assert other.pin(memory) == "staging memory is not page-locked (cudaHostRegister gave 712)"
    other.unpin(memory)
    assert len(runtime.locked) == 1
    one.unpin(memory)
    one.unpin(memory)
    assert not runtime.locked


@pytest.mark.parametrize(("uuid", "asked"), [("1-2", ["GPU-1-2", "MIG-1-2"]), ("MIG-3", ["MIG-3"])])
def test_a_part_of_a_device_is_found_in_nvml_too(uuid: str, asked: list[str]) -> None:
    """Its indices are not CUDA's, which CUDA_VISIBLE_DEVICES renumbers."""
    seen: list[str] = []

    class Nvml:
        NVMLError = LookupError

        @staticmethod
        def nvmlDeviceGetHandleByUUID(uuid: bytes) -> str:
            seen.append(uuid.decode())
            if not uuid.startswith(b"MIG-"):
                raise LookupError
            return "handle"

    assert _nvml_handle(Nvml, uuid) == "handle"
    assert seen == asked


# ---------------------------------------------------------------------- what torch may be asked


@pytest.fixture
def flags() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.conv.fp32_precision = "none"  # type: ignore[attr-defined]
    set_matmul("fp32")


@pytest.mark.usefixtures("flags")
def test_a_model_that_speaks_of_tf32_in_the_new_words_is_understood() -> None:
    """torch raises where the old flags are read after the new ones were set: such a model stopped the start."""
    set_matmul("fp32")
    assert not uses_tf32()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    assert uses_tf32()
    set_matmul("fp32")
    assert not uses_tf32()


@pytest.mark.parametrize(("device", "runners"), [("cpu", 1), ("cuda:1", 2)])
def test_a_package_on_an_accelerator_may_run_one_batch_while_it_begins_the_next(
    device: str, runners: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one runner it waited for the batch before, with the thread that should launch the next."""
    asked: dict[str, Any] = {}
    loads = SimpleNamespace(load_package=lambda path, **given: asked.update(given, path=path))
    monkeypatch.setitem(sys.modules, "torch._inductor.package.package", loads)  # the real one takes seconds to import
    aoti.load_package(Path("model.pt2"), torch.device(device))
    assert asked == {"path": "model.pt2", "num_runners": runners}
