"""How much of a device's memory a batch will take, from what the warm-up measured. Pure arithmetic, no torch.

A replica asks before it launches, so that a batch runs in pieces, or waits for the one in front of it, instead of
running out of memory. What no measurement can tell is still caught: see `caps`. Linear in padded elements: between the
sizes of a bucket along the measured points, between buckets along their elements. A model whose memory grows faster
with the length, as with attention, should have its lengths in `batch.shape_buckets`: then each of them is measured.
"""

from __future__ import annotations

from collections.abc import Iterable


class Peaks:
    """The measured peaks, as (bucket, rows, bytes), and `room`, the bytes that batches may take; None: no bound."""

    def __init__(self, points: Iterable[tuple[int, int, int]] = (), room: int | None = None) -> None:
        self._points: dict[int, list[tuple[int, int]]] = {}
        for bucket, rows, size in sorted(points):
            measured = self._points.setdefault(max(bucket, 1), [])
            highest = max([size, *(taken for _, taken in measured)])  # an allocator's steps must not look like a fall
            measured.append((rows, highest))
        self._room = room
        self._known: dict[tuple[int, int], int] = {}

    @property
    def room(self) -> int | None:
        """Bytes that batches may take; None where nobody knows, or nothing was measured."""
        return self._room if self._points else None

    @room.setter
    def room(self, room: int | None) -> None:
        if room != self._room:
            self._room = room
            self._known.clear()

    def bytes(self, bucket: int, rows: int) -> float:
        """Return the bytes that a batch will take; 0 where nothing was measured."""
        bucket = max(bucket, 1)
        if bucket in self._points or not self._points:
            return self._along(bucket, rows)
        below = max((known for known in self._points if known < bucket), default=None)
        above = min((known for known in self._points if known > bucket), default=None)
        if below is None or above is None:
            nearest = below or above or bucket
            return self._along(nearest, rows) * bucket / nearest
        low, high = self._along(below, rows), self._along(above, rows)
        return low + (high - low) * (bucket - below) / (above - below)

    def rows(self, bucket: int, largest: int) -> int:
        """Return the most rows up to `largest` that fit together, at least one: of one, only a try can say."""
        if self.room is None:
            return largest
        known = self._known.get((bucket, largest))
        if known is None:
            known = self._known[bucket, largest] = self._search(bucket, largest, self.room)
        return known

    def bound(self, bucket: int, largest: int) -> int:
        """Return the same where it is less than `largest`, else 0: no bound."""
        rows = self.rows(bucket, largest)
        return rows if rows < largest else 0

    def fits(self, bucket: int, rows: int, taken: int) -> bool:
        """Whether a batch fits beside `taken` bytes of another one."""
        return self.room is None or self.bytes(bucket, rows) + taken <= self.room

    def _search(self, bucket: int, largest: int, room: int) -> int:
        if self.bytes(bucket, largest) <= room:
            return largest
        fits, refused = 1, largest
        while refused - fits > 1:
            middle = (fits + refused) // 2
            if self.bytes(bucket, middle) <= room:
                fits = middle
            else:
                refused = middle
        return fits

    def _along(self, bucket: int, rows: int) -> float:
        """Return the bytes on the line through a bucket's points; beyond the last, on as steep as its last step."""
        points = self._points.get(bucket)
        if not points:
            return 0.0
        before = points[0]
        if rows <= before[0]:
            return before[1]  # what one size needs is no more than what a larger one does
        step = before[1] / before[0]
        for after in points[1:]:
            step = (after[1] - before[1]) / (after[0] - before[0])
            if rows <= after[0]:
                break
            before = after
        return before[1] + step * (rows - before[0])
