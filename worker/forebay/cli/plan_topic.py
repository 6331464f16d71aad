"""The traffic of a real topic for `forebay plan`: when its records came, and what shapes they have.

It reads records without a group and keeps their times and shapes, never their contents.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forebay.batching.padding import Axes
from forebay.batching.trace import DEFAULT_PRIORITY, Arrival
from forebay.cli.plan_traffic import Traffic, faster
from forebay.errors import ConfigError
from forebay.wording import counted

if TYPE_CHECKING:
    from forebay.records import Record
    from forebay.settings import Kafka

_SHAPE = re.compile(rb'"shape"\s*:\s*\[([0-9,\s]{1,200})\]')
_MOST_SHAPES = 16
_MINUTE_MS = 60_000


@dataclass(slots=True)
class Seen:
    """What is kept of a record."""

    at_ms: int
    partition: int
    shapes: tuple[tuple[int, ...], ...]
    priority: int = DEFAULT_PRIORITY
    timeout_ms: float | None = None
    model: str | None = None


def from_topic(
    kafka: Kafka, topic: str, last: int, minutes: float | None, advance: Callable[[int], None] | None = None
) -> list[Seen]:
    """Read the last records of a topic, or those of the last minutes, in order of time. Joins no group."""
    from forebay.cli.progress import waiting_for_kafka
    from forebay.stream.tail import OPEN_SECONDS, Last, Tail

    with waiting_for_kafka(kafka.bootstrap_servers, OPEN_SECONDS):
        if minutes is None:
            partitions = Tail.require(kafka, topic)
            share = min(last, math.ceil(2 * last / partitions))
            tail = Tail(kafka, [topic], Last(share))
        else:
            share = 0
            tail = Tail(kafka, [topic], int(time.time() * 1000 - minutes * _MINUTE_MS))
        tail.open()
    look = _Look()
    found: list[Seen] = []
    try:
        for record in tail.read_to_end():
            found.append(look.at(record))
            if advance is not None and len(found) % 256 == 0:
                advance(len(found))
    finally:
        tail.close()
    if not found:
        when = f" of the last {minutes:g} minutes" if minutes is not None else ""
        raise ConfigError(f"topic {topic} holds no record{when}: there is no traffic to replay; give --rate instead")
    found.sort(key=lambda seen: seen.at_ms)
    kept = found if minutes is not None else newest(found, last, share)
    verify(kept, topic)
    return kept


def of_model(found: list[Seen], topic: str, name: str, default: str) -> list[Seen]:
    """Return what asks for one of several models; a request that names none asks for the default one."""
    kept = [seen for seen in found if (seen.model or default) == name]
    if not kept:
        raise ConfigError(f"topic {topic} holds no record for model {name}; give --rate instead")
    verify(kept, topic)
    return kept


def verify(found: Sequence[Seen], topic: str) -> None:
    """Raise ConfigError where the times of the records tell nothing about how they came."""
    if len(found) < 2:
        raise ConfigError(f"topic {topic} holds one record: that is no traffic to replay; give --rate instead")
    start, end = found[0].at_ms, found[-1].at_ms
    if start < 0:
        raise ConfigError(f"the records of topic {topic} carry no time; give --rate instead")
    if start == end:
        raise ConfigError(
            f"all {len(found):,} records of topic {topic} carry the same time ({_clock(start)}): they were published "
            "at once, or stamped when they were appended (message.timestamp.type); give --rate instead"
        )


def newest(found: list[Seen], last: int, share: int) -> list[Seen]:
    """Return the newest `last` records of which every partition was read; `share` is what was read of each at most.

    Before the first record of a partition that was cut off there may be more that was not read: the trace starts there.
    """
    counts = Counter(seen.partition for seen in found)
    firsts: dict[int, int] = {}
    for seen in found:
        firsts.setdefault(seen.partition, seen.at_ms)
    whole = max((firsts[partition] for partition, count in counts.items() if count >= share), default=found[0].at_ms)
    return [seen for seen in found if seen.at_ms >= whole][-last:]


def as_traffic(found: Sequence[Seen], topic: str, axes: Axes | None, speed: float = 1.0) -> Traffic:
    """Make traffic of what was seen.

    `axes` are the model's ragged dimensions; () for a model that pads nothing, None where all that is known is that it
    pads: then they are the dimensions that vary here.
    """
    padded = fitting(found, axes)
    arrivals, kinds = _arrivals(found, padded)
    notes = []
    if bare := sum(not seen.shapes for seen in found):
        notes.append(f"{counted(bare, 'record')} of {len(found):,} tell no shape: taken as one row each")
    if kinds > 1:
        notes.append(f"{kinds:,} shapes that cannot share a batch")
    start, end = found[0].at_ms, found[-1].at_ms
    source = f"{counted(len(found), 'record')} of topic {topic}, {_clock(start)} to {_clock(end)}"
    if speed != 1:
        source += f", {speed:g} times as fast"
    return Traffic(faster(arrivals, speed), source, notes, padded)


def fitting(found: Sequence[Seen], axes: Axes | None) -> Axes:
    """Return the ragged dimensions that all the requests have; without `axes`, those in which they differ."""
    shapes = [seen.shapes for seen in found if seen.shapes]
    if not shapes or len(shapes) < len(found):  # one that tells no shape can be padded to none
        return ()
    ranks = {tuple(map(len, one)) for one in shapes}
    if len(ranks) > 1:
        return ()
    (rank,) = ranks
    if axes is not None:
        return axes if all(index < len(rank) and dimension < rank[index] for index, dimension in axes) else ()
    return tuple(
        (index, dimension)
        for index in range(len(rank))
        for dimension in range(1, rank[index])
        if len({one[index][dimension] for one in shapes}) > 1
    )


def _arrivals(found: Sequence[Seen], axes: Axes) -> tuple[list[Arrival], int]:
    """Make the arrivals; requests that differ elsewhere than in `axes` are of different kinds, which are counted."""
    ragged = set(axes)
    kinds: dict[tuple[tuple[int, ...], ...], int] = {}
    arrivals = []
    for seen in found:
        at = (seen.at_ms - found[0].at_ms) / 1000
        fixed = tuple(
            tuple(-1 if (index, dimension) in ragged else size for dimension, size in enumerate(shape) if dimension)
            for index, shape in enumerate(seen.shapes)
        )
        arrivals.append(
            Arrival(
                at,
                rows=seen.shapes[0][0] if seen.shapes else 1,
                dims=tuple(shape[1:] for shape in seen.shapes),
                kind=kinds.setdefault(fixed, len(kinds)),
                priority=seen.priority,
                deadline=None if seen.timeout_ms is None else at + seen.timeout_ms / 1000,
                partition=seen.partition,
            )
        )
    return arrivals, len(kinds)


class _Look:
    """Looks at records without decoding them."""

    def __init__(self) -> None:
        from forebay.settings import Limits
        from forebay.stream.headers import HeaderReader

        self._reader = HeaderReader(Limits())

    def at(self, record: Record) -> Seen:
        """Return what matters of a record. Headers that are wrong count as absent, a wrong shape as none."""
        from forebay.errors import RequestError
        from forebay.stream.headers import Envelope

        envelope = self._reader.kept(record.headers)
        if envelope is None:
            envelope = Envelope()
            try:
                self._reader.read(record, envelope)
            except RequestError:
                envelope = Envelope()
        timeout: float | None = envelope.timeout_ms
        if envelope.deadline_ms is not None:
            timeout = envelope.deadline_ms - record.timestamp_ms
        value = record.value or b""
        shapes = shapes_of(value if envelope.header_bytes is None else value[: envelope.header_bytes])
        priority = envelope.priority or DEFAULT_PRIORITY
        return Seen(record.timestamp_ms, record.partition, shapes, priority, timeout, envelope.model)


def shapes_of(head: bytes) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that the JSON of a request names, found without parsing it; none where they make no sense."""
    shapes: list[tuple[int, ...]] = []
    for match in _SHAPE.finditer(head):
        numbers = [part for part in match[1].replace(b" ", b"").split(b",") if part.strip()]
        shape = tuple(map(int, numbers))
        if shape and all(0 < dim < 2**40 for dim in shape):
            shapes.append(shape)
    same_rows = len({shape[0] for shape in shapes}) == 1
    return tuple(shapes[:_MOST_SHAPES]) if same_rows else ()


def _clock(at_ms: int) -> str:
    """Show a time of the wall clock."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"{at_ms} ms"
