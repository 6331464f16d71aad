"""Streams and events of the fake accelerator: a timeline of its own, which moves one tick whenever somebody looks.

Nothing here depends on the machine's clock or on threads. A copy happens when its turn on its stream comes, so a
missing wait, a result that was freed too early or a slot that was written too early shows as spoilt bytes, every time.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

import torch

_SPOILT = 0xA5


class Work:
    """Something that takes `ticks` and then runs `then`; None never ends."""

    __slots__ = ("_then", "number", "ticks")

    def __init__(self, ticks: int | None, then: Callable[[], None] | None, number: int) -> None:
        self.ticks = ticks
        self.number = number
        self._then = then

    def end(self) -> None:
        """Do what was to be done."""
        if self._then is not None:
            self._then()


class Leftover(Work):
    """What a failed forward has launched before its error: it runs all the same, and may write into its inputs."""

    __slots__ = ("has_ended", "stream")

    def __init__(self, stream: FakeStream, ticks: int, number: int) -> None:
        super().__init__(ticks, None, number)
        self.stream = stream
        self.has_ended = False

    def end(self) -> None:
        """Do no harm any more."""
        self.has_ended = True


class Incoming(Work):
    """A copy from a slot to the device. `move` brings the bytes; the slot may change only after the copy has ended.

    It lands in memory that a failed forward had, as an allocator would have it: unless it waits for what that has left
    behind, its bytes are spoilt.
    """

    __slots__ = ("_behind", "_seen", "_source", "_target")

    def __init__(self, source: torch.Tensor, target: torch.Tensor, timeline: Timeline) -> None:
        super().__init__(1, None, timeline.number())
        self._source, self._target = source, target
        self._behind = [one for one in timeline.leftovers if not one.has_ended]
        self._seen: torch.Tensor | None = None

    def move(self, waits: Iterable[FakeEvent] = ()) -> None:
        """Bring the bytes, once; `waits` are the events that the stream waits for before."""
        if self._seen is not None:
            return
        self._seen = self._source.clone()
        self._target.copy_(self._seen)
        if not all(one.has_ended or any(event.is_behind(one) for event in waits) for one in self._behind):
            spoil(self._target)

    def end(self) -> None:
        """Bring the bytes, and see whether the slot is as it was."""
        self.move()
        if not torch.equal(as_bytes(self._source), as_bytes(self._seen)):
            raise RuntimeError("fake accelerator: a slot was written while the device read it")


class Mark:
    """The place of an event in a stream."""

    __slots__ = ("event",)

    def __init__(self, event: FakeEvent) -> None:
        self.event = event


class Wait:
    """A stream that stands still until an event has happened."""

    __slots__ = ("event",)

    def __init__(self, event: FakeEvent) -> None:
        self.event = event


class Timeline:
    """The time of one fake device, and whether the device is lost."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.now = 0
        self.lost: str | None = None
        self.leftovers: list[Leftover] = []
        self._works = 0

    def number(self) -> int:
        """Return the next number of a piece of work, in the order of their launches."""
        self._works += 1
        return self._works

    def leave(self, stream: FakeStream, ticks: int) -> None:
        """Let a failed forward's work end some ticks ahead."""
        self.leftovers = [one for one in self.leftovers if not one.has_ended]
        self.leftovers.append(Leftover(stream, ticks, self.number()))
        stream.queue.append(self.leftovers[-1])

    def check(self) -> None:
        """Raise what a lost device raises, for ever."""
        if self.lost is not None:
            raise torch.AcceleratorError(self.lost)

    def tick(self) -> bool:
        """Move on by one tick; return whether anything moved."""
        self.check()
        self.now += 1
        moved = [stream.step() for stream in self.streams]
        self.check()
        return any(moved)

    def run_out(self, done: Callable[[], bool]) -> None:
        """Move on until `done`; where nothing moves any more this hangs, as a device does."""
        while not done():
            if not self.tick():
                time.sleep(0.01)


class FakeStream:
    """A queue of work, marks and waits."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.queue: deque[Work | Mark | Wait] = deque()
        timeline.streams.append(self)

    def wait_event(self, event: FakeEvent) -> None:
        """Stand still, when all before is done, until the event has happened."""
        self.queue.append(Wait(event))

    def step(self) -> bool:
        """Work for one tick; return whether anything moved."""
        moved = self._pass_marks()
        head = self.queue[0] if self.queue else None
        if isinstance(head, Work) and head.ticks is not None:
            head.ticks -= 1
            moved = True
            if head.ticks <= 0:
                self.queue.popleft()
                head.end()
                self._pass_marks()
        return moved

    def _pass_marks(self) -> bool:
        moved = False
        while self.queue:
            head = self.queue[0]
            if isinstance(head, Mark):
                head.event.happened = True
            elif not (isinstance(head, Wait) and head.event.happened):
                break
            self.queue.popleft()
            moved = True
        return moved

    def is_busy_before(self, number: int) -> bool:
        """Whether work that was launched before `number` has not ended."""
        return any(isinstance(entry, Work) and entry.number < number for entry in self.queue)

    def see(self) -> None:
        """Bring the bytes that the next work here may read: those of the copies before the events that it waits for."""
        for entry in self.queue:
            if isinstance(entry, Wait) and entry.event.stream is not None:
                entry.event.stream.bring_before(entry.event)

    def bring_before(self, event: FakeEvent) -> None:
        """Move the bytes of the copies in front of an event's mark."""
        for entry in self.queue:
            if isinstance(entry, Mark) and entry.event is event:
                return
            if isinstance(entry, Incoming):
                entry.move(self.waits(entry))

    def waits(self, before: Incoming | None = None) -> list[FakeEvent]:
        """Return the events that stand in front of an entry, or of what comes next."""
        entries = takewhile(lambda entry: entry is not before, self.queue)
        return [entry.event for entry in entries if isinstance(entry, Wait)]


class FakeEvent:
    """A mark in a stream, which has happened when everything in front of it has ended."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.happened = True
        self.stream: FakeStream | None = None
        self._number = 0

    def record(self, stream: FakeStream) -> None:
        """Put the mark behind what the stream has to do by now."""
        self.happened, self.stream, self._number = False, stream, self._timeline.number()
        stream.queue.append(Mark(self))

    def is_behind(self, work: Leftover) -> bool:
        """Whether it happens after that work, on the same stream."""
        return self.stream is work.stream and self._number > work.number

    def query(self) -> bool:
        """Whether it has happened; to look takes one tick."""
        if not self.happened:
            self._timeline.tick()
        else:
            self._timeline.check()
        return self.happened

    def synchronize(self) -> None:
        """Wait until it has happened."""
        self._timeline.check()
        self._timeline.run_out(lambda: self.happened)


def outgoing(result: torch.Tensor, place: torch.Tensor, is_early: Callable[[], bool]) -> Callable[[], None]:
    """Return what a copy to a slot does when its turn comes; `is_early` says that it did not wait."""
    source: Any = weakref.ref(result)

    def store() -> None:
        found = source()
        if found is None or is_early():
            spoil(place)
        else:
            place.copy_(found)

    return store


def spoil(tensor: torch.Tensor) -> None:
    """Fill memory that nobody has written yet, so that reading it shows."""
    as_bytes(tensor).fill_(_SPOILT)


def as_bytes(tensor: Any) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, to compare NaN with NaN."""
    return torch.as_tensor(tensor).reshape(-1).view(torch.uint8)
