"""What is finished ahead of the low watermark, as the text that travels in a commit's metadata. Pure.

A restart reads from the committed offset; the positions in this text are not answered again. Skipping a record that has
no outcome would lose it, so whatever is in doubt is not skipped: another format, another committed offset (somebody has
reset the group), a first record with another timestamp (the topic was deleted and made again).

    forebay1 BASE FIRST STAMP BITS

BASE is the committed offset that the text belongs to, FIRST the first finished offset above it, STAMP that record's
timestamp, BITS one bit for each offset from FIRST on, compressed, in base 85.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

_FORMAT = "forebay1"
SPAN = 16_384
"""Offsets that a text covers: even bits that do not compress stay below 2,700 characters; a broker takes 4,096."""


@dataclass(slots=True)
class Ahead:
    """Finished offsets that an earlier owner of the partition has noted.

    `is_sure` once the record at `first` was read and has the timestamp that it had then.
    """

    first: int
    stamp: int
    offsets: set[int]
    last: int
    is_sure: bool = False


def write(base: int, first: int, stamp: int, offsets: Iterable[int]) -> str:
    """Return the text for finished `offsets`, of which `first` is the lowest; what is too far ahead is left out."""
    bits = bytearray()
    for offset in offsets:
        place = offset - first
        if place < SPAN:
            byte = place >> 3
            if byte >= len(bits):
                bits.extend(bytes(byte + 1 - len(bits)))
            bits[byte] |= 1 << (place & 7)
    packed = base64.b85encode(zlib.compress(bits, 6)).decode()
    return f"{_FORMAT} {base} {first} {stamp} {packed}"


def read(base: int, text: str | None) -> Ahead | None:
    """Return what a text says, None where it is not ours, not whole, or belongs to another committed offset."""
    parts = (text or "").split(" ")
    if len(parts) != 5 or parts[0] != _FORMAT:
        return None
    try:
        of, first, stamp = map(int, parts[1:4])
        unpacker = zlib.decompressobj()
        bits = unpacker.decompress(base64.b85decode(parts[4]), SPAN // 8)
    except (ValueError, zlib.error):
        return None
    if of != base or first <= base or not unpacker.eof or not bits or not bits[0] & 1:
        return None
    offsets = {first + place for place in range(len(bits) * 8) if bits[place >> 3] >> (place & 7) & 1}
    return Ahead(first, stamp, offsets, max(offsets))
