"""What a run left behind, as plain values: the topics whole, what was committed when, and how the workers ended.

The checker reads nothing else. `tests/faults/dumps.py` fills these from a real Kafka, the in-memory runs from their
broker, and the checker's own tests by hand.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Literal

Place = tuple[str, int]
"""A topic and a partition."""

Position = tuple[str, int, int]
"""A topic, a partition and an offset."""

LETTERLESS = b"deadline_exceeded"
"""The one error code that has no dead letter."""


@dataclass(frozen=True, slots=True)
class Logged:
    """A record as it lies in a log."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int = 0

    @property
    def position(self) -> Position:
        """Where it lies."""
        return self.topic, self.partition, self.offset

    @property
    def place(self) -> Place:
        """The partition in which it lies."""
        return self.topic, self.partition

    def header(self, name: str) -> bytes | None:
        """Return the last header of that name."""
        return next((value for key, value in reversed(self.headers) if key == name), None)


class Fate(StrEnum):
    """What a producer knows of a request that it sent."""

    ACKED = "acked"
    UNKNOWN = "unknown"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Sample:
    """The committed offsets at one moment, and the ends of the logs that were read after them."""

    committed: Mapping[Place, int]
    ends: Mapping[Place, int]


@dataclass(frozen=True, slots=True)
class Fault:
    """A moment at which work could be left half done: from what was committed before it to the input's ends."""

    name: str
    committed: Mapping[Place, int]
    ends: Mapping[Place, int]

    def covers(self, position: Position) -> bool:
        """Whether a request may have been begun and not committed then."""
        topic, partition, offset = position
        place = (topic, partition)
        return self.committed.get(place, 0) <= offset < self.ends.get(place, 0)


@dataclass(frozen=True, slots=True)
class Report:
    """One worker's life. `code` None means that it had to be put down; `counters` None that nobody could read them.

    `counters` are its requests by outcome ("ok" or an error code) and "dead_letters"; `highest` is what a resource
    reached.
    """

    name: str
    code: int | None = 0
    allowed_codes: frozenset[int] = frozenset({0})
    counters: Mapping[str, float] | None = None
    highest: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=dict)
    rebalances: int = 0
    allowed_rebalances: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Promise:
    """What the run was to keep. `settled` says that it went on until nothing was left to do.

    With `deduplicate_ms` an id gets one outcome in a window of that length; 0: every request gets one.
    """

    guarantee: Literal["at_least_once", "exactly_once"] = "at_least_once"
    ordering: Literal["none", "partition", "key"] = "none"
    settled: bool = True
    deduplicate_ms: int = 0


Answers = Callable[[Logged, Logged], "str | None"]
"""Says what is wrong with an outcome of a request, or None: recomputed, never by the worker's own code."""


@dataclass(frozen=True, slots=True)
class History:
    """A run, whole.

    `outcomes` and `letters` are every record of their topics; `invisible` are the positions of those that a
    `read_committed` reader never sees. `stable` maps their partitions to the last stable offset and the end.
    `journal` has the fate of each request by its key, where producers kept one.
    """

    promise: Promise
    inputs: tuple[Logged, ...]
    outcomes: tuple[Logged, ...]
    letters: tuple[Logged, ...] = ()
    invisible: frozenset[Position] = frozenset()
    committed: Mapping[Place, int] = field(default_factory=dict)
    ends: Mapping[Place, int] = field(default_factory=dict)
    stable: Mapping[Place, tuple[int, int]] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    faults: tuple[Fault, ...] = ()
    workers: tuple[Report, ...] = ()
    journal: Mapping[bytes, Fate] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    answers: Answers | None = None


class View:
    """A history with the indexes that the invariants share."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.promise = history.promise
        self.exactly_once = history.promise.guarantee == "exactly_once"
        self.requests: dict[Position, Logged] = {record.position: record for record in history.inputs}

    def sees(self, record: Logged) -> bool:
        """Whether a `read_committed` reader sees a record."""
        return record.position not in self.history.invisible

    @cached_property
    def visible(self) -> list[Logged]:
        """The outcomes that a `read_committed` reader sees."""
        return [outcome for outcome in self.history.outcomes if self.sees(outcome)]

    @cached_property
    def outcomes_of(self) -> dict[Position, list[Logged]]:
        """The visible outcomes of each request that has any, in the order of their logs."""
        found: dict[Position, list[Logged]] = defaultdict(list)
        for outcome in self.visible:
            source = source_of(outcome)
            if source is not None:
                found[source].append(outcome)
        return found

    @cached_property
    def letters_of(self) -> dict[Position, list[Logged]]:
        """The visible dead letters of each request that has any."""
        found: dict[Position, list[Logged]] = defaultdict(list)
        for letter in self.history.letters:
            source = coordinates_of(letter)
            if source is not None and self.sees(letter):
                found[source].append(letter)
        return found

    @cached_property
    def clocks(self) -> dict[Position, int]:
        """The newest timestamp of each request's partition when it was written."""
        found: dict[Position, int] = {}
        newest: dict[Place, int] = defaultdict(int)
        for record in sorted(self.history.inputs, key=lambda record: record.position):
            newest[record.place] = found[record.position] = max(newest[record.place], record.timestamp_ms)
        return found

    @cached_property
    def namesakes(self) -> dict[tuple[Place, bytes], list[Logged]]:
        """The requests of a partition that have one id, in their order."""
        found: dict[tuple[Place, bytes], list[Logged]] = defaultdict(list)
        for record in sorted(self.history.inputs, key=lambda record: record.position):
            found[record.place, ids_of(record)[0]].append(record)
        return found

    def is_repeat(self, request: Logged) -> bool:
        """Whether an earlier request of the window has its id, so that it needs no outcome of its own."""
        span, clock = self.promise.deduplicate_ms, self.clocks[request.position]
        return span > 0 and any(
            clock - self.clocks[other.position] <= span
            for other in self.namesakes[request.place, ids_of(request)[0]]
            if other.offset < request.offset
        )

    def must_be_answered(self) -> Iterator[Logged]:
        """Yield the requests that must have an outcome: all that were committed, and in a settled run all there are.

        Repeats need none.
        """
        committed = self.history.committed
        for record in self.history.inputs:
            must = self.promise.settled or record.offset < committed.get(record.place, 0)
            if must and not self.is_repeat(record):
                yield record


def source_of(outcome: Logged) -> Position | None:
    """Return the position of the request that an outcome names, None if it names none."""
    parts = (outcome.header("source") or b"").decode(errors="replace").rsplit("/", 2)
    if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
        return None
    return parts[0], int(parts[1]), int(parts[2])


def coordinates_of(letter: Logged) -> Position | None:
    """Return the position of the request that a dead letter is a copy of, None if it does not say."""
    topic = letter.header("kafka_dlt-original-topic")
    partition = letter.header("kafka_dlt-original-partition")
    offset = letter.header("kafka_dlt-original-offset")
    if topic is None or partition is None or offset is None or (len(partition), len(offset)) != (4, 8):
        return None
    return topic.decode(errors="replace"), int.from_bytes(partition, "big"), int.from_bytes(offset, "big")


def is_error(outcome: Logged) -> bool:
    """Whether an outcome is an error."""
    return outcome.header("status") == b"error"


def has_letter(outcome: Logged) -> bool:
    """Whether a dead letter belongs to an outcome."""
    return is_error(outcome) and outcome.header("error-code") != LETTERLESS


def ids_of(request: Logged) -> list[bytes]:
    """Return the ids that a request may go by, the right one first; the others count where it could not be read."""
    named = [request.header("x-request-id"), _id_in(request), request.key, place_name(request.position).encode()]
    return [name for name in named if name is not None]


def place_name(position: Position) -> str:
    """Return a position as an outcome names it."""
    return "/".join(map(str, position))


def _id_in(request: Logged) -> bytes | None:
    length = request.header("inference-header-content-length")
    try:
        body = json.loads((request.value or b"")[: int(length)] if length else request.value or b"")
    except ValueError:
        return None
    name = body.get("id") if isinstance(body, dict) else None
    return name.encode() if isinstance(name, str) and name else None
