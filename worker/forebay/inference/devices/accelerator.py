"""An accelerator as the runner sees it: three streams and the events between them, the same for CUDA and the fake.

A copy stream brings a batch in, the compute stream runs it, another copy stream takes its results to the slot. Nothing
here waits for the device; `Landing.wait` does. Runs in the replica's thread; imports torch.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from forebay.inference.devices.cpu import Copy, Device, Landing, resident_bytes


class Stream(Protocol):
    """Work that runs in order."""

    def wait_event(self, event: Any) -> None: ...


class Event(Protocol):
    """A mark in a stream."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Backend(Protocol):
    """What CUDA and the fake do differently. Copies are asynchronous where the host's side is page-locked."""

    device: torch.device
    name: str

    def stream(self) -> Stream: ...
    def event(self) -> Event: ...
    def on(self, stream: Any) -> AbstractContextManager[Any]: ...
    def computing(self, stream: Any) -> AbstractContextManager[Any]: ...
    def pin(self, memory: mmap.mmap) -> str | None: ...
    def unpin(self, memory: mmap.mmap) -> None: ...
    def settle(self) -> None: ...
    def fetch(self, staged: torch.Tensor) -> torch.Tensor: ...
    def store(self, result: torch.Tensor, place: torch.Tensor) -> None: ...
    def capture(self, stream: Any, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]: ...
    def empty_cache(self) -> None: ...
    def reset_peak(self) -> None: ...
    def peak(self) -> int: ...
    def room(self) -> int | None: ...
    def tolerance(self, precision: str) -> float: ...
    def memory(self) -> dict[str, int]: ...


class _InFlight:
    """Results that an event says are there. It keeps what the device reads alive until then."""

    __slots__ = ("_event", "_keep")

    def __init__(self, event: Event, keep: object) -> None:
        self._event = event
        self._keep = keep

    def is_done(self) -> bool:
        """Ask the device; raises what it raises where it is lost."""
        return self._event.query()

    def wait(self) -> None:
        """Wait for the event and let the memory go."""
        self._event.synchronize()
        self._keep = None


class Accelerator(Device):
    """A device with streams of its own. Inputs are brought in again for every try: a model may write into them."""

    overlaps = True

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend.device)
        self.name = backend.name
        self.backend = backend
        self._incoming, self._compute, self._outgoing = backend.stream(), backend.stream(), backend.stream()

    def pin(self, memory: mmap.mmap) -> str | None:
        """Page-lock the staging memory, once."""
        return self.backend.pin(memory)

    def unpin(self, memory: mmap.mmap) -> None:
        """Let go of the staging memory, before it is unmapped."""
        self.backend.unpin(memory)

    def settle(self) -> None:
        """Wait for everything that was begun: the streams here do not wait for the one that `load` used."""
        self.backend.settle()

    def upload(self, staged: Mapping[str, Any]) -> dict[str, Any]:
        """Begin to copy staged tensors in; the compute stream waits for them, this thread does not."""
        with self.backend.on(self._incoming):
            copied = {
                name: self.backend.fetch(value) if isinstance(value, torch.Tensor) else value
                for name, value in staged.items()
            }
        there = self.backend.event()
        there.record(self._incoming)
        self._compute.wait_event(there)
        return copied

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run what is inside on the compute stream."""
        with self.backend.on(self._compute), self.backend.computing(self._compute):
            yield

    def download(self, copies: Sequence[Copy], keep: object = None) -> Landing:
        """Begin to copy results out, behind everything that the compute stream has to do by now."""
        computed = self.backend.event()
        computed.record(self._compute)
        self._outgoing.wait_event(computed)
        with self.backend.on(self._outgoing):
            for result, place in copies:
                self.backend.store(result, place)
        landed = self.backend.event()
        landed.record(self._outgoing)
        return _InFlight(landed, (copies, keep))

    def abandon(self) -> None:
        """Let what is brought in from now on wait for what a failed forward has left behind on the compute stream.

        The allocator gives the memory of the failed batch to the next one of the same stream, while a kernel that was
        launched before the error may still write into it.
        """
        left = self.backend.event()
        left.record(self._compute)
        self._incoming.wait_event(left)

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record what `run` does on the compute stream; return what does it again, and `run`'s outputs.

        The replay reads what `run` read and writes into these outputs. All graphs share one pool of memory.
        """
        self.backend.settle()
        return self.backend.capture(self._compute, run)

    def recover(self) -> None:
        """Give cached blocks back to the driver. It waits for the device: only for after an allocation failed."""
        self.backend.empty_cache()

    def reset_peak(self) -> None:
        """Begin to measure the most memory that is taken at once."""
        self.backend.reset_peak()

    def peak(self) -> int:
        """Return the most bytes that batches have taken at once since `reset_peak`."""
        return self.backend.peak()

    def room(self) -> int | None:
        """Return the bytes that batches may take above what was taken at `reset_peak`."""
        return self.backend.room()

    def tolerance(self, precision: str) -> float:
        """Return the relative difference that batching alone may make to a row's outputs."""
        return self.backend.tolerance(precision)

    def memory(self) -> dict[str, int]:
        """Return the process's, the allocator's and the device's figures."""
        return {"resident": resident_bytes(), **self.backend.memory()}
