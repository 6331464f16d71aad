"""Duplicates of a request id: a record that asks again for what an earlier record of its partition asked for. Pure.

A partition has a clock, the newest timestamp among its records so far. An id is known until that clock is a window
ahead of where it stood when the id was answered first. What repeats a known id gets no outcome of its own: it waits
while the first record with the id is in flight, and is finished with it; where that one ends in an error that asks for
another try, the next takes its place. The loop's thread owns all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from hashlib import blake2b
from typing import Protocol

from forebay.records import Partition, Record

_REPLAYS = "forebay-replays"
"""A dead letter that an operator replays is meant to run again: the count of its replays belongs to its id."""


class Asked(Protocol):
    """A request, or a record that was refused: something with an id that gets an outcome."""

    record: Record
    id: str


class Fate(Enum):
    """What becomes of a record: it is the first with its id, waits for the first, or repeats what was answered."""

    FIRST = "first"
    WAITS = "waits"
    REPEATS = "repeats"


class _Original:
    """The first record with an id, in flight, and those that wait for its end. `clock` is the partition's then."""

    __slots__ = ("clock", "digest", "waiting")

    def __init__(self, digest: bytes, clock: int, waiting: deque[Asked]) -> None:
        self.digest = digest
        self.clock = clock
        self.waiting = waiting


class Window:
    """The ids that one partition knows, at most `most`, each for `span_ms` of the partition's clock.

    Two generations: the older is dropped whole when the younger has lasted for a window, or has half of the ids.
    """

    __slots__ = ("_began", "_latest", "_most", "_old", "_running", "_span", "_young", "clock", "forgotten")

    def __init__(self, span_ms: int, most: int) -> None:
        self._span = span_ms
        self._most = most
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._began = 0
        self._running: dict[int, _Original] = {}
        self._latest: dict[bytes, _Original] = {}
        self.clock = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def remember(self, digest: bytes, stamp: int) -> None:
        """Note an id that has its outcome already."""
        self.clock = max(self.clock, stamp)
        if not self._knows(digest):
            self._note(digest)

    def admit(self, asked: Asked, digest: bytes, stamp: int) -> Fate:
        """Say what becomes of a record that was just read."""
        self.clock = clock = max(self.clock, stamp)
        original = self._latest.get(digest)
        if original is not None and original.clock >= clock - self._span:
            original.waiting.append(asked)
            return Fate.WAITS
        if self._knows(digest):
            return Fate.REPEATS
        self._begin(asked, digest, deque())
        return Fate.FIRST

    def answered(self, offset: int, *, retriable: bool) -> tuple[Collection[Asked], Asked | None]:
        """Take in that a record has its outcome; `retriable` says that it is an error that asks for another try.

        Returns those that are finished with it, and the one that takes its place.
        """
        original = self._running.pop(offset, None)
        if original is None:
            return (), None
        digest, waiting = original.digest, original.waiting
        if self._latest.get(digest) is not original:
            return waiting, None  # a later window has its own: in an ordered line nobody may wait for what is behind
        del self._latest[digest]
        if not retriable:
            return waiting, None
        self._forget(digest)
        if not waiting:
            return (), None
        following = waiting.popleft()
        self._begin(following, digest, waiting)
        return (), following

    def abandoned(self, offset: int) -> deque[Asked]:
        """Take in that a record will not be answered here; return those that waited for it."""
        original = self._running.pop(offset, None)
        if original is None:
            return deque()
        if self._latest.get(original.digest) is original:
            del self._latest[original.digest]
            self._forget(original.digest)
        return original.waiting

    def __iter__(self) -> Iterator[Asked]:
        return (asked for original in self._running.values() for asked in original.waiting)

    def _begin(self, asked: Asked, digest: bytes, waiting: deque[Asked]) -> None:
        self._running[asked.record.offset] = self._latest[digest] = _Original(digest, self.clock, waiting)
        self._note(digest)

    def _knows(self, digest: bytes) -> bool:
        known = self._young.get(digest)
        if known is None:
            known = self._old.get(digest)
        return known is not None and known >= self.clock - self._span

    def _note(self, digest: bytes) -> None:
        expired = self.clock - self._began > self._span
        if expired or len(self._young) >= self._most // 2:
            if self._began >= self.clock - self._span:
                self.forgotten += len(self._old)
            self._old, self._young, self._began = self._young, {}, self.clock
        self._young[digest] = self.clock

    def _forget(self, digest: bytes) -> None:
        self._young.pop(digest, None)
        self._old.pop(digest, None)


class Duplicates:
    """The windows of the partitions that are assigned now.

    `repeated` counts the records that got no outcome of their own, since it was last set to 0; `waiting` those that
    wait for the end of another now.
    """

    def __init__(self, span_ms: int, most: int) -> None:
        self._span = span_ms
        self._most = most
        self._windows: dict[tuple[str, int], Window] = {}
        self.waiting = 0
        self.repeated = 0

    def assigned(self, partitions: Iterable[Partition]) -> None:
        """Begin anew with each newly assigned partition."""
        for partition in partitions:
            self._windows[partition] = Window(self._span, self._most)

    def forgotten(self, partitions: Iterable[Partition]) -> list[Asked]:
        """Drop the windows of partitions that belong to somebody else now; return the records that waited in them."""
        left = [asked for place in partitions for asked in self._windows.pop(place, ())]
        self.waiting -= len(left)
        return left

    def remember(self, record: Record, id: str, now_ms: float) -> None:
        """Note that the id of a record is answered: an earlier owner of the partition has seen to it."""
        window = self._windows.get((record.topic, record.partition))
        if window is not None and (digest := digest_of(record, id)) is not None:
            window.remember(digest, stamp_of(record, now_ms))

    def admit(self, asked: Asked, now_ms: float) -> Fate:
        """Say what becomes of a record that was just read and decoded."""
        record = asked.record
        window = self._windows.get((record.topic, record.partition))
        digest = digest_of(record, asked.id)
        if window is None or digest is None:
            return Fate.FIRST
        fate = window.admit(asked, digest, stamp_of(record, now_ms))
        if fate is Fate.WAITS:
            self.waiting += 1
        return fate

    def answered(self, record: Record, *, retriable: bool) -> tuple[Collection[Asked], Asked | None]:
        """Do what the partition's window does; the record must be of its current assignment."""
        window = self._windows.get((record.topic, record.partition))
        if window is None:
            return (), None
        finished, following = window.answered(record.offset, retriable=retriable)
        self.waiting -= len(finished) + (following is not None)
        return finished, following

    def abandoned(self, records: Iterable[Record]) -> list[Asked]:
        """Take in that records will not be answered here; return those that waited for them, to be given back, too."""
        left: list[Asked] = []
        for record in records:
            window = self._windows.get((record.topic, record.partition))
            if window is not None:
                left += window.abandoned(record.offset)
        self.waiting -= len(left)
        return left

    def take_forgotten(self) -> int:
        """Return how many ids were forgotten early since the last call."""
        total = 0
        for window in self._windows.values():
            total += window.forgotten
            window.forgotten = 0
        return total

    def __iter__(self) -> Iterator[Asked]:
        """Give the records that wait for the end of another."""
        return (asked for window in self._windows.values() for asked in window)

    def __len__(self) -> int:
        return sum(map(len, self._windows.values()))


def digest_of(record: Record, id: str) -> bytes | None:
    """Return what stands for an id in memory, None for the id of a record that has none: its position never repeats."""
    if id == record.source:
        return None
    replays = next((value for name, value in record.headers if name == _REPLAYS and value), b"")
    return blake2b(id.encode(), digest_size=16, key=replays[:64]).digest()


def stamp_of(record: Record, now_ms: float) -> int:
    """Return a record's time in ms: a time that is missing, or still to come, counts as now."""
    return min(record.timestamp_ms, int(now_ms)) if record.timestamp_ms > 0 else int(now_ms)
