"""What a consumer asks the brokers about offsets: committed ones, their metadata, those at a time.

On the loop's thread. Each question waits for its time-out at most and raises nothing: None says that no answer came,
and `note` takes why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import confluent_kafka as ck

from forebay.records import Partition
from forebay.stream.member import Event

_ASSIGN_SECONDS = 3.0


class Questions:
    """The questions of one consumer; `client` is set once it is made."""

    def __init__(self, note: Callable[[Event], None]) -> None:
        self._note = note
        self._known: dict[Partition, Any] = {}
        self.client: Any = None

    @contextmanager
    def assigning(self, partitions: list[Partition]) -> Iterator[dict[Partition, Any]]:
        """Ask what is committed of partitions once, for all who want to know it in the body; None where nobody says."""
        found = self.ask(partitions, _ASSIGN_SECONDS) if partitions else []
        said = {Partition(p.topic, p.partition): p for p in found or () if p.error is None}
        self._known = {partition: said.get(partition) for partition in partitions}
        try:
            yield self._known
        finally:
            self._known = {}

    def ask(self, partitions: Iterable[Partition], timeout: float) -> list[Any] | None:
        """Return the group's committed offsets as the client has them."""
        wanted = list(partitions)
        if wanted and self._known.keys() >= set(wanted):
            known = [self._known[partition] for partition in wanted]
            return None if any(place is None for place in known) else known
        asked = [ck.TopicPartition(*partition) for partition in wanted]
        return self._answer(lambda: self.client.committed(asked, timeout=timeout))

    def committed(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int | None] | None:
        """Return the group's committed offsets, None where there is none."""
        found = self.ask(partitions, timeout)
        if found is None or any(p.error is not None for p in found):
            return None
        return {Partition(p.topic, p.partition): p.offset if p.offset >= 0 else None for p in found}

    def notes(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, tuple[int, str]]:
        """Return the committed offsets that have metadata, with it; none without an answer."""
        found = self.ask(partitions, timeout) or []
        return {Partition(p.topic, p.partition): (p.offset, p.metadata) for p in found if p.offset >= 0 and p.metadata}

    def offsets_at(self, times: Mapping[Partition, int], timeout: float) -> dict[Partition, int | None] | None:
        """Return the first offset at or after each time in ms, None where there is none."""
        asked = [ck.TopicPartition(*partition, time) for partition, time in times.items()]
        found = self._answer(lambda: self.client.offsets_for_times(asked, timeout=timeout))
        if found is None or any(p.error is not None for p in found):
            return None
        return {Partition(p.topic, p.partition): p.offset if p.offset >= 0 else None for p in found}

    def _answer(self, ask: Callable[[], list[Any]]) -> list[Any] | None:
        try:
            return ask()
        except ck.KafkaException as error:
            self._note(Event(error.args[0].name(), error.args[0].str()))
            return None
