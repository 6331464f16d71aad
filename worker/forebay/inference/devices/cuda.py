"""CUDA behind an accelerator: page-locked slots, the allocator's budget and its figures. Imports torch; needs a GPU."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from forebay.inference.precision import tolerance, uses_tf32

_TF32_TOLERANCE = 5e-3
_USABLE = 15 / 16
"""Share of the free memory that counts: the allocator works in blocks, and cannot join what lies apart."""


class CudaBackend:
    """One CUDA device. `memory_fraction` bounds what this process may allocate on it."""

    def __init__(self, device: torch.device, memory_fraction: float | None = None) -> None:
        torch.cuda.set_device(device)
        if memory_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(float(memory_fraction), device)
        self._fraction = memory_fraction
        self.device = device
        self.name = torch.cuda.get_device_name(device)
        self._pinned: set[int] = set()
        self._pool: Any = None
        self._base = 0
        self._graphs = 0  # bytes that only graphs may use: reserved, and no room for anything else
        self._process_bytes = _nvml_process_bytes(device)

    def stream(self) -> Any:
        """Return a new stream."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def event(self) -> Any:
        """Return a new event; a thread that waits for it sleeps instead of spinning."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` the current one of this thread."""
        return torch.cuda.stream(stream)

    def computing(self, stream: Any) -> AbstractContextManager[Any]:
        """Return nothing more to enter: kernels go to the current stream."""
        return nullcontext()

    def pin(self, memory: mmap.mmap) -> str | None:
        """Page-lock the staging memory."""
        address = _address(memory)
        code = int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0))  # type: ignore[no-untyped-call]
        if code == 0:
            self._pinned.add(address)
            return None
        with suppress(RuntimeError):  # CUDA keeps the error for whoever asks next: torch, behind its next kernel
            torch.full((1,), 1.0, device=self.device)
        return f"staging memory is not page-locked (cudaHostRegister gave {code})"

    def unpin(self, memory: mmap.mmap) -> None:
        """Let go of the staging memory: what is mapped at its addresses later could not be page-locked."""
        address = _address(memory)
        if address in self._pinned:
            self._pinned.remove(address)
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Wait for every stream."""
        torch.cuda.synchronize(self.device)

    def fetch(self, staged: torch.Tensor) -> torch.Tensor:
        """Allocate on the current stream and begin the copy; the slot stays as it is until the batch is done."""
        return staged.to(self.device, non_blocking=bool(self._pinned))

    def store(self, result: torch.Tensor, place: torch.Tensor) -> None:
        """Begin the copy to the slot."""
        place.copy_(result, non_blocking=bool(self._pinned))

    def capture(self, stream: Any, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Run once more, so that libraries have their workspaces on this stream, then record."""
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        before = self._unused()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            outputs = run()
        self._graphs += max(self._unused() - before, 0)
        return graph.replay, outputs

    def _unused(self) -> int:
        return torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def empty_cache(self) -> None:
        """Give cached blocks back to the driver."""
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Begin to measure above what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self._base = torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """Return the most bytes above what was allocated at `reset_peak`."""
        return max(torch.cuda.max_memory_allocated(self.device) - self._base, 0)

    def room(self) -> int | None:
        """Return what the driver and the allocator's own cache have left, within this process's share."""
        free, total = torch.cuda.mem_get_info(self.device)
        room = free + torch.cuda.memory_reserved(self.device) - self._graphs
        if self._fraction is not None:
            room = min(room, int(total * self._fraction))
        return int((room - self._base) * _USABLE)

    def tolerance(self, precision: str) -> float:
        """Return what batching may change: TF32, which a model's own code may turn on, keeps ten bits."""
        if precision not in ("fp32", "tf32"):
            return tolerance(precision)
        return _TF32_TOLERANCE if uses_tf32() else 1e-5

    def memory(self) -> dict[str, int]:
        """Return the allocator's, the device's and, through NVML where nvidia-ml-py is there, the process's bytes."""
        free, total = torch.cuda.mem_get_info(self.device)
        found = {
            "allocated": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "device_used": total - free,
            "device_total": total,
        }
        process = self._process_bytes()
        return found if process is None else {**found, "device_process": process}


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _nvml_handle(pynvml: Any, uuid: str) -> Any:
    """Return NVML's handle: by UUID, for its indices are the driver's, whatever CUDA_VISIBLE_DEVICES says."""
    if uuid.startswith(("GPU-", "MIG-")):
        return pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except pynvml.NVMLError:  # a part of a device
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}".encode())


def _nvml_process_bytes(device: torch.device) -> Callable[[], int | None]:
    """Return a function that says what this process takes of the device, contexts included; None where nobody knows."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = _nvml_handle(pynvml, str(torch.cuda.get_device_properties(device).uuid))
    except Exception:  # not installed, or no driver library: the metric is simply not there
        return lambda: None

    def ask() -> int | None:
        try:
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except pynvml.NVMLError:
            return None
        used = [process.usedGpuMemory for process in running if process.pid == os.getpid()]
        return used[0] if used else None

    return ask
