"""The service-time curve: how long one execution takes, by bucket and rows. Learnt from what ran; pure.

A bucket is the number of padded elements per row in the ragged inputs, 0 where nothing varies. Times are steps, not a
line (tiles, waves, caches), so the curve is a table: the median and the 95th percentile of the last executions of
each size class, sixteen per doubling, with straight lines between them. Only outside what was measured, and for
a bucket that never ran, a line through the origin of the fixed cost has to do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from statistics import median

_KEPT = 50
_FRESH_SECONDS = 5.0
_REFIT_SECONDS = 1.0
_EAGER_REFITS = 64
"""Executions of a bucket after each power of two of which the table is made anew, whatever the clock says."""

_DRIFT = 1.2
"""A change of the measured classes beyond this factor is a change of the machine: it holds for the others, too."""

Point = tuple[float, float, float]
"""Rows, median seconds, 95th percentile in seconds."""


class _Bucket:
    """What ran in one bucket: per size class the last executions, as (time, rows, seconds), and the table of them."""

    __slots__ = ("executions", "fitted_at", "recent", "rows", "table", "touched")

    def __init__(self) -> None:
        self.recent: dict[int, deque[tuple[float, int, float]]] = {}
        self.table: list[Point] = []
        self.rows: list[float] = []
        self.touched: set[int] = set()
        self.executions = 0
        self.fitted_at = float("-inf")


class Curve:
    """The service time of one model. All times are seconds."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self.version = 0

    def seed(self, points: Iterable[tuple[int, float]], bucket: int = 0) -> None:
        """Take over (rows, seconds) that the warm-up measured."""
        for rows, seconds in points:
            self._note(bucket, rows, seconds, float("-inf"))
        if bucket in self._buckets:
            self._fit(self._buckets[bucket], float("-inf"))

    def forget(self) -> None:
        """Forget everything: another model runs under this name."""
        self._buckets.clear()
        self.version += 1

    def observe(self, bucket: int, rows: int, seconds: float, now: float) -> None:
        """Learn that `rows` rows of a bucket took `seconds`; the table follows at most once a second."""
        found = self._note(bucket, rows, seconds, now)
        found.executions += 1
        eager = found.executions <= _EAGER_REFITS and found.executions & (found.executions - 1) == 0
        if eager or now - found.fitted_at >= _REFIT_SECONDS:
            self._fit(found, now)

    def predict(self, bucket: int, rows: float) -> float:
        """Return the median time of an execution; 0 where nothing was ever measured."""
        return self._read(bucket, rows, 1)

    def high(self, bucket: int, rows: float) -> float:
        """Return the 95th percentile of the time of an execution; 0 where nothing was ever measured."""
        return self._read(bucket, rows, 2)

    def largest(self, bucket: int, within: float, at_most: int) -> int:
        """Return the most rows, up to `at_most`, whose 95th percentile is within `within`; 0 if not even one row's."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            if self.high(bucket, middle) <= within * (1 + 1e-9):
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def buckets(self) -> list[int]:
        """The buckets of which something is known."""
        return sorted(self._buckets)

    def points(self) -> list[tuple[int, int, float, float]]:
        """Return what was measured: bucket, rows, median and 95th percentile."""
        return [
            (bucket, round(rows), middle, high)
            for bucket, found in sorted(self._buckets.items())
            for rows, middle, high in found.table
        ]

    def _note(self, bucket: int, rows: int, seconds: float, now: float) -> _Bucket:
        found = self._buckets.get(bucket)
        if found is None:
            found = self._buckets[bucket] = _Bucket()
        kind = _size_class(rows)
        recent = found.recent.get(kind)
        if recent is None:
            recent = found.recent[kind] = deque(maxlen=_KEPT)
        elif recent[0][0] == float("-inf") and now > float("-inf"):
            recent.clear()  # what really runs replaces what the warm-up measured
        recent.append((now, rows, seconds))
        found.touched.add(kind)
        return found

    def _fit(self, found: _Bucket, now: float) -> None:
        """Make the table anew; where the measured classes drifted, the others are moved along."""
        before = {_size_class(round(point[0])): point for point in found.table}
        table: dict[int, Point] = {}
        drifts: list[float] = []
        for kind in found.touched:
            point = table[kind] = _point(found.recent[kind], now)
            if kind in before and before[kind][1] > 0:
                drifts.append(point[1] / before[kind][1])
        drift = median(drifts) if drifts else 1.0
        drift = drift if max(drift, 1 / max(drift, 1e-9)) > _DRIFT else 1.0
        for kind, (rows, middle, high) in before.items():
            if kind not in table:
                table[kind] = (rows, middle * drift, high * drift)
        found.table = sorted(table.values())
        found.rows = [point[0] for point in found.table]
        found.touched.clear()
        found.fitted_at = now
        self.version += 1

    def _read(self, bucket: int, rows: float, column: int) -> float:
        found = self._buckets.get(bucket)
        if found is not None and found.table:
            return _between(found, rows, column)
        known = [(other, one) for other, one in self._buckets.items() if one.table]
        if not known:
            return 0.0
        nearest, one = min(known, key=lambda pair: abs(pair[0] - bucket))
        seconds = _between(one, rows, column)
        if not nearest:
            return seconds
        fixed = min(_between(one, 0, 1), seconds)
        return fixed + (seconds - fixed) * bucket / nearest


def _size_class(rows: int) -> int:
    """Return a number that is equal for sizes alike: each up to 32, then sixteen classes per doubling.

    A class ends at a multiple of its width, as the tiles of the hardware do: 64 and 65 rows are never taken together.
    """
    last = max(rows - 1, 0)
    shift = max(last.bit_length() - 5, 0)
    return (shift << 5) + (last >> shift)


def _point(recent: Iterable[tuple[float, int, float]], now: float) -> Point:
    """Return the point of a size class: of the last seconds where there is enough, else of all that is kept."""
    kept = list(recent)
    fresh = [one for one in kept if now - one[0] <= _FRESH_SECONDS]
    chosen = fresh if len(fresh) >= 3 else kept
    times = sorted(seconds for _, _, seconds in chosen)
    rows = sum(rows for _, rows, _ in chosen) / len(chosen)
    return rows, median(times), times[min(round(0.95 * len(times)), len(times) - 1)]


def _between(found: _Bucket, rows: float, column: int) -> float:
    """Read a table: straight lines between its points, the nearest two's line beyond them, never below zero."""
    table = found.table
    at = bisect_left(found.rows, rows)
    if at < len(table) and found.rows[at] == rows:
        return table[at][column]
    if len(table) == 1:
        return table[0][column] * max(rows / table[0][0], 1.0) if table[0][0] else table[0][column]
    at = min(max(at, 1), len(table) - 1)
    left, right = table[at - 1], table[at]
    slope = (right[column] - left[column]) / (right[0] - left[0])
    if rows < left[0] or rows > right[0]:
        slope = max(slope, 0.0)
    return max(left[column] + slope * (rows - left[0]), min(left[column], right[column]) * 0.5, 0.0)
