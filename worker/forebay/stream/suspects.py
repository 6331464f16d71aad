"""Requests under suspicion, as text that travels in a commit's metadata beside what is finished ahead. Pure.

A request whose replica died while it ran is suspect: it runs again alone, and is poisoned after a few runs. A worker
that has to leave meanwhile hands on which positions those are and how often each was tried, so that the next owner goes
on counting: else a request that ends every worker would end them for ever.

    suspects1 BASE FIRST STAMP LIST

BASE is the committed offset that the text belongs to, FIRST the lowest suspect offset, STAMP that record's timestamp.
LIST has, for each suspect, how far it is from FIRST and its attempts, compressed, in base 85. Whatever is in doubt is
not believed; the request then starts without attempts.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from forebay.records import Record

_FORMAT = "suspects1"
_ENTRY = struct.Struct("<HB")
MOST = 256
"""Suspects that a text names, those with the most attempts first: below 1,100 characters, beside 2,700 of `ahead`."""

_MOST_ATTEMPTS = 255
_SPAN = 65_535


@dataclass(slots=True)
class Suspects:
    """What an earlier owner of the partition noted. `is_sure` once the record at `first` was read as it was then."""

    first: int
    stamp: int
    attempts: dict[int, int]
    is_sure: bool = False

    def meet(self, record: Record) -> bool:
        """Take in a record that was read; False where nothing of this is to be believed, or to come, any more."""
        if record.offset < self.first:
            return True
        if not self.is_sure and (record.offset != self.first or record.timestamp_ms != self.stamp):
            return False
        self.is_sure = True
        return record.offset <= max(self.attempts)


def write(base: int, stamp: int, attempts: Mapping[int, int]) -> str:
    """Return the text for suspects and their attempts; `stamp` is the timestamp of the lowest."""
    first = min(attempts)
    near = [offset for offset in attempts if offset - first <= _SPAN]
    kept = sorted(near, key=lambda offset: (offset != first, -attempts[offset], offset))[:MOST]
    packed = b"".join(_ENTRY.pack(one - first, min(attempts[one], _MOST_ATTEMPTS)) for one in sorted(kept))
    return f"{_FORMAT} {base} {first} {stamp} {base64.b85encode(zlib.compress(packed, 6)).decode()}"


def read(base: int, text: str) -> Suspects | None:
    """Return what a text says, None where it is not ours, not whole, or belongs to another committed offset."""
    parts = text.split(" ")
    if len(parts) != 5 or parts[0] != _FORMAT:
        return None
    try:
        of, first, stamp = map(int, parts[1:4])
        unpacker = zlib.decompressobj()
        packed = unpacker.decompress(base64.b85decode(parts[4]), MOST * _ENTRY.size)
        attempts = {first + place: count for place, count in _ENTRY.iter_unpack(packed)}
    except (ValueError, zlib.error, struct.error):
        return None
    if of != base or first < base or not unpacker.eof or first not in attempts:
        return None
    return Suspects(first, stamp, attempts)


class Charges:
    """The suspects of one assignment of a partition: those known here, and those recalled that are still to be read."""

    __slots__ = ("_told", "known", "recalled")

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, int]] = {}
        """Attempts and timestamp by offset."""
        self._told: dict[int, tuple[int, int]] | None = {}
        self.recalled: Suspects | None = None

    def meet(self, record: Record) -> int | None:
        """Return the attempts of a suspect that was just read, None where the record is none."""
        recalled = self.recalled
        if recalled is None:
            return None
        if not recalled.meet(record):
            self.recalled = None
            return None
        attempts = recalled.attempts.get(record.offset)
        if attempts is not None:
            self.known[record.offset] = (attempts, record.timestamp_ms)
        return attempts

    @property
    def has_news(self) -> bool:
        """Whether a commit has yet to say what is known."""
        return self.known != self._told

    def note(self, base: int, position: int | None) -> str | None:
        """Return the text for a commit of `base`, by a worker that has read up to `position`; None where there is none.

        What was recalled and not read yet is handed on as long as there is a record to know its topic by.
        """
        own = {offset: found for offset, found in self.known.items() if offset >= base}
        attempts = {offset: count for offset, (count, _) in own.items()}
        recalled = self.recalled
        if recalled is not None and position is not None:
            attempts |= {offset: count for offset, count in recalled.attempts.items() if offset >= position}
        if not attempts:
            return None
        first = min(attempts)
        if first in own:
            return write(base, own[first][1], attempts)
        return None if recalled is None or recalled.is_sure else write(base, recalled.stamp, attempts)

    def asked(self) -> None:
        """Note that a commit says what is known."""
        self._told = dict(self.known)

    def refused(self) -> None:
        """Note that the commit failed."""
        self._told = None
