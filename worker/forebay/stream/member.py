"""What the corridor and a consumer are to each other: the calls of a member of a group, and what it tells in return.

There are three: the member of a consumer group, the one of a share group, and the in-memory one of `forebay.testing`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from forebay.records import Partition, Record


class Listener(Protocol):
    """What a consumer tells about its assignment; runs inside `receive`."""

    def assigned(self, partitions: list[Partition]) -> None: ...
    def revoked(self, partitions: list[Partition]) -> None: ...
    def lost(self, partitions: list[Partition]) -> None: ...


class Member(Protocol):
    """What the corridor needs of a consumer: the real one here, or the in-memory one of `forebay.testing`."""

    events: deque[Event]
    commits: deque[tuple[dict[Partition, int], dict[Partition, str]]]
    commits_in_flight: int
    paused: bool

    def start(self, listener: Listener) -> None: ...
    def receive(self, limit: int, wait: float) -> list[Record]: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def commit(self, marks: dict[Partition, int], notes: Mapping[Partition, str] | None = None) -> None: ...
    def notes(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, tuple[int, str]]: ...
    def committed(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int | None] | None: ...
    def offsets_at(self, times: Mapping[Partition, int], timeout: float) -> dict[Partition, int | None] | None: ...
    def seek(self, partition: Partition, offset: int) -> None: ...
    def rewind(self, partitions: Iterable[Partition]) -> bool: ...
    def reaches(self, topics: Iterable[str], timeout: float) -> bool: ...
    def end_offset(self, partition: Partition) -> int | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the client reported beside records. `name` is librdkafka's name of the error, or one of ours.

    `skipped` counts requests that were deleted in the partition before they were answered, up to `offset`.
    """

    name: str
    message: str
    partition: Partition | None = None
    offset: int | None = None
    skipped: int = 0

    @property
    def is_end(self) -> bool:
        """Whether it says that a partition was read to its end."""
        return self.name == "_PARTITION_EOF"
