"""The ledger of queue mode: which records this worker has been lent, and what to tell the broker about each. Pure.

In a share group no offset is committed. The broker lends records out in waves, counts how often it has lent each, and
takes back what is not acknowledged before its lock runs out. `Leases` stands where the ledgers of partitions stand in
the other modes, so that custody and the corridor see no difference; there are no partitions in it. The loop's thread
alone uses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from forebay.records import Record
from forebay.stream.offsets import Offsets

Place = tuple[str, int, int]
"""Topic, partition and offset."""


class Verdict(Enum):
    """What the broker is told about a lent record: it is done with, or somebody is to have it again."""

    ACCEPT = "accept"
    RELEASE = "release"


@dataclass(slots=True)
class Leased(Record):
    """A record that the broker has lent for the `deliveries`th time; after the last one it would lend it no more."""

    deliveries: int = 1
    is_last: bool = False


@dataclass(slots=True)
class Wave:
    """The records of one poll. `since` is when the broker may have locked them at the earliest, on the worker's clock.

    `left` are those that nothing was said about, `verdicts` what is still to be told.
    """

    number: int
    since: float
    left: set[Place] = field(default_factory=set)
    verdicts: list[tuple[Place, Verdict]] = field(default_factory=list)

    def judge(self, place: Place, verdict: Verdict) -> bool:
        """Decide about a record; False where that was done before."""
        if place not in self.left:
            return False
        self.left.discard(place)
        self.verdicts.append((place, verdict))
        return True

    def told(self) -> list[tuple[Place, Verdict]]:
        """Return what is to be told, once."""
        verdicts, self.verdicts = self.verdicts, []
        return verdicts

    @property
    def is_over(self) -> bool:
        """Whether everything is decided and told."""
        return not self.left and not self.verdicts


class Leases(Offsets):
    """What was lent and is not over, by wave; a record's `epoch` is the number of its wave.

    A record that keeps coming back may be what ends the workers. One that was delivered more than `max_attempts` times
    is a suspect: it has one run left, alone. At the last delivery that the group allows it has none and is poisoned
    without a run: if it ended this worker, too, the broker would drop it and nobody would answer it.
    """

    def __init__(self, max_attempts: int) -> None:
        super().__init__()
        self._max_attempts = max_attempts
        self._waves: dict[int, Wave] = {}
        self._number = 0

    def begin(self, since: float) -> Wave:
        """Open a wave."""
        self._number += 1
        wave = self._waves[self._number] = Wave(self._number, since)
        return wave

    def end(self, wave: Wave) -> None:
        """Forget a wave that is over."""
        self._waves.pop(wave.number, None)

    def oldest(self) -> float | None:
        """Return when the oldest wave with something undecided was lent; None if there is none."""
        return min((wave.since for wave in self._waves.values() if wave.left), default=None)

    def release(self, record: Record) -> None:
        """Give a record back: somebody is to have it again."""
        self._judge(record, Verdict.RELEASE)

    def opened(self, record: Record) -> bool:
        """Whether there is something to do for a record that was read; notes one that its deliveries make suspect."""
        if not self.holds(record):
            return False
        if isinstance(record, Leased) and (record.is_last or record.deliveries > self._max_attempts):
            attempts = max(record.deliveries - 1, self._max_attempts) if record.is_last else self._max_attempts - 1
            self.returning[record.topic, record.partition, record.offset] = attempts
        return True

    def opened_all(self, records: Iterable[Record]) -> list[Record]:
        """Do what `opened` does for many records; return those that there is something to do for."""
        return [record for record in records if self.opened(record)]

    def holds(self, record: Record) -> bool:
        """Whether a record is still lent to this worker, as far as this worker has not given it back."""
        wave = self._waves.get(record.epoch)
        return wave is not None and (record.topic, record.partition, record.offset) in wave.left

    def is_open(self, record: Record) -> bool:
        """Whether a record is lent to this worker and has no acknowledged outcome yet."""
        return self.holds(record)

    def suspect(self, charges: Iterable[tuple[Record, int]]) -> None:
        """Note nothing: the next worker goes by the broker's count of deliveries."""

    def closed_all(self, records: Iterable[Record]) -> None:
        """Accept records whose outcomes are acknowledged."""
        for record in records:
            self._judge(record, Verdict.ACCEPT)

    def abandoned(self, record: Record) -> None:
        """Give back a record that will not be finished here."""
        self.release(record)

    def _judge(self, record: Record, verdict: Verdict) -> None:
        wave = self._waves.get(record.epoch)
        if wave is not None:
            wave.judge((record.topic, record.partition, record.offset), verdict)
