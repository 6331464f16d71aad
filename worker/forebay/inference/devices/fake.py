"""The fake accelerator: streams, events, a memory limit, out of memory, sticky errors and hangs, all on the CPU.

`inference.device: fake` or `fake:0?memory=16rows&sticky=-9`; nothing but the name leads to it. It is there so that the
code for accelerators runs in tests without one; whatever happens on it happens again in the next run. Imports torch.
"""

from __future__ import annotations

import mmap
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import torch

from forebay.errors import ConfigError
from forebay.inference.devices.fake_graphs import Tape
from forebay.inference.devices.fake_memory import FakeAllocator
from forebay.inference.devices.fake_streams import FakeEvent, FakeStream, Incoming, Timeline, Work, outgoing, spoil
from forebay.inference.precision import tolerance

OPTIONS = "memory (16rows, 4MiB), ticks, sticky, hang, corrupt, swell, pin, trace"
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_TRACED = 100_000
_SILENT: dict[str, Callable[[torch.Tensor], object]] = {"corrupt": lambda x: x.add_(1), "swell": lambda x: x.mul_(1.5)}


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """What the device can do. `sticky` and `hang` are input values that make it fail, as a device-side assert does.

    `corrupt` is an input value after which it says nothing, and every number that it computes is one too large; `swell`
    one after which every number is half too large: of zeros it makes the right ones.
    `ticks` is how often somebody has to look until a forward has ended. `trace` is a file for what happened.
    """

    index: int = 0
    rows: int | None = None
    memory: int | None = None
    ticks: int = 3
    sticky: float | None = None
    hang: float | None = None
    corrupt: float | None = None
    swell: float | None = None
    pins: bool = True
    trace: str | None = None


def parse(name: str) -> FakeOptions:
    """Read `fake`, `fake:1` or `fake:0?option=value&…`. Raises ConfigError with what there is."""
    device, _, query = name.partition("?")
    index = device.partition(":")[2] or "0"
    if not index.isdecimal():
        raise ConfigError(f"inference.device {name!r}: a fake device reads fake:0?option=value, options are {OPTIONS}")
    found: dict[str, Any] = {"index": int(index)}
    for key, value in parse_qsl(query, keep_blank_values=True):
        try:
            found |= _option(key, value)
        except (ValueError, LookupError) as error:
            raise ConfigError(f"inference.device: {key}={value} is not understood; options are {OPTIONS}") from error
    return FakeOptions(**found)


def _option(key: str, value: str) -> dict[str, Any]:
    if key == "memory":
        if value.endswith("rows"):
            return {"rows": int(value.removesuffix("rows"))}
        number, unit = re.findall(r"^(\d+)\s*([A-Za-z]*)$", value)[0]
        return {"memory": int(number) * _UNITS[unit]}
    if key == "ticks":
        return {"ticks": max(int(value), 1)}
    if key in ("sticky", "hang", *_SILENT):
        return {key: float(value)}
    if key == "pin":
        return {"pins": {"yes": True, "no": False}[value]}
    return {{"trace": "trace"}[key]: value}


class FakeBackend:
    """One fake device. `trace` has what happened, in order."""

    def __init__(self, options: FakeOptions, memory_fraction: float | None = None) -> None:
        self.device = torch.device("cpu")
        self.name = f"fake accelerator {options.index}"
        self.options = options
        self.trace: deque[str] = deque(maxlen=_TRACED)
        self.timeline = Timeline()
        limit = options.memory
        if limit is not None and memory_fraction is not None:
            limit = int(limit * memory_fraction)
        self.allocator = FakeAllocator(limit)
        self._current = FakeStream(self.timeline)
        self._computing: FakeStream | None = None
        self._rows = 0
        self._fate: str | None = None
        self._spoils: Callable[[torch.Tensor], object] | None = None
        self._launches = 0
        self._graphs = 0
        self._base = 0

    def note(self, event: str) -> None:
        """Write down what happened."""
        self.trace.append(event)
        if self.options.trace is not None:
            with open(self.options.trace, "a") as file:
                file.write(event + "\n")

    def stream(self) -> FakeStream:
        """Return a new stream."""
        return FakeStream(self.timeline)

    def event(self) -> FakeEvent:
        """Return a new event."""
        return FakeEvent(self.timeline)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Make `stream` the current one."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def computing(self, stream: FakeStream) -> Iterator[None]:
        """Run a forward at once, with the bytes that its stream has waited for; its end lies `ticks` ahead."""
        self.timeline.check()
        self._computing = stream
        stream.see()
        if self.options.rows is not None and self._rows > self.options.rows:
            self.note(f"refuse {self._rows}")
            raise torch.OutOfMemoryError(f"fake accelerator out of memory: {self._rows} rows")
        self._launches += 1
        number, fate, self._fate = self._launches, self._fate, None
        self.note(f"launch {number} rows {self._rows}")
        try:
            with self.allocator:
                yield
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                self.note(f"refuse {self._rows}")
            self.timeline.leave(stream, self.options.ticks)
            raise
        ticks = None if fate == "hang" else self.options.ticks
        stream.queue.append(Work(ticks, lambda: self._computed(number, fate), self.timeline.number()))

    def _computed(self, number: int, fate: str | None) -> None:
        self.note(f"computed {number}")
        if fate == "sticky":
            self.timeline.lost = "fake accelerator: device-side assert triggered"
            self.note("lost")

    def pin(self, memory: mmap.mmap) -> str | None:
        """Take the staging memory for page-locked, unless told otherwise."""
        return None if self.options.pins else "staging memory is not page-locked (the fake was told pin=no)"

    def unpin(self, memory: mmap.mmap) -> None:
        """Note it."""
        self.note("unpin")

    def settle(self) -> None:
        """Run every stream out."""
        self.timeline.run_out(lambda: not any(stream.queue for stream in self.timeline.streams))

    def fetch(self, staged: torch.Tensor) -> torch.Tensor:
        """Allocate spoilt memory, to be filled when the copy's turn comes."""
        self.timeline.check()
        target = torch.empty_like(staged, memory_format=torch.contiguous_format)
        self.allocator.count(target)
        self._rows = len(staged)
        for fate, mark in (("hang", self.options.hang), ("sticky", self.options.sticky)):
            if mark is not None and bool((staged == mark).any()):
                self._fate = fate
        for name, spoils in _SILENT.items():
            mark = getattr(self.options, name)
            if mark is not None and bool((staged == mark).any()):
                self._spoils = spoils
        spoil(target)
        copy = Incoming(staged, target, self.timeline)
        if self.options.pins:
            self._current.queue.append(copy)
        else:
            copy.move(self._current.waits())
        return target

    def store(self, result: torch.Tensor, place: torch.Tensor) -> None:
        """Copy to the slot when the turn comes: at once, after everything, where it is not page-locked."""
        number, computing = self.timeline.number(), self._computing
        end = outgoing(result, place, lambda: computing is not None and computing.is_busy_before(number))
        spoils = self._spoils
        if spoils is not None and place.is_floating_point():
            end = _then(end, lambda: spoils(place))
        self._current.queue.append(Work(1, end, number))
        if not self.options.pins:
            stream = self._current
            self.timeline.run_out(lambda: not stream.queue)

    def capture(self, stream: FakeStream, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Write down the operations of a run; a replay does them again where they are."""
        self.timeline.check()
        tape = Tape()
        with self.allocator, tape:
            outputs = run()
        self._graphs += 1
        number = self._graphs
        self.note(f"capture {number}")

        def replay() -> None:
            self.note(f"replay {number}")
            tape.replay()

        return replay, outputs

    def empty_cache(self) -> None:
        """Give back what is not in use."""
        self.allocator.reserved = self.allocator.live
        self.note("empty_cache")

    def reset_peak(self) -> None:
        """Begin to measure above what is taken now."""
        self._base = self.allocator.highest = self.allocator.live

    def peak(self) -> int:
        """Return the most bytes above what was taken at `reset_peak`."""
        return self.allocator.highest - self._base

    def room(self) -> int | None:
        """Return what the limit leaves."""
        return None if self.allocator.limit is None else self.allocator.limit - self._base

    def tolerance(self, precision: str) -> float:
        """Return the CPU's."""
        return tolerance(precision)

    def memory(self) -> dict[str, int]:
        """Return the allocator's figures."""
        found = {"allocated": self.allocator.live, "reserved": self.allocator.reserved}
        if self.allocator.limit is not None:
            found |= {"device_used": self.allocator.reserved, "device_total": self.allocator.limit}
        return found


def _then(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both
