"""Padding: into which bucket a ragged request falls, and how many rows a batch should have. Pure arithmetic.

The replica pads every execution up to the next allowed size and, where buckets are explicit, to their bounds; here is
decided what goes into the batch, so that it pads little or that padding is the cheaper choice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Literal

from forebay.batching.curve import Curve
from forebay.records import Request

Axes = tuple[tuple[int, int], ...]
"""The ragged dimensions of a model's inputs, as (input, dimension) pairs: requests may differ there, and are padded."""


def volume(dims: Iterable[int]) -> int:
    """Return the number of elements in a tensor of these dimensions."""
    product = 1
    for dim in dims:
        product *= dim
    return product


def series(at_least: int) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24 … that is not below a length.

    The steps of a third to a half keep padding inside a bucket below a fifth for lengths spread evenly.
    """
    if at_least <= 4:
        return max(at_least, 1)
    power = 1 << ((at_least - 1).bit_length() - 1)
    return power + power // 2 if at_least <= power + power // 2 else 2 * power


def bound(length: int, bounds: Sequence[int] | None) -> int:
    """Return the bucket of a length: the next of `bounds`, or of the series where there are none or all are smaller."""
    if bounds:
        at = bisect_left(bounds, length)
        if at < len(bounds):
            return bounds[at]
    return series(length)


def bucket_of(request: Request, axes: Axes, bounds: Sequence[int] | None) -> tuple[int, tuple[int, ...]]:
    """Return the padded elements per row of a request's ragged inputs, and the bounds of its ragged dimensions."""
    dims: dict[int, list[int]] = {}
    found: list[int] = []
    for index, axis in axes:
        shape = dims.get(index)
        if shape is None:
            shape = dims[index] = list(request.shapes[index])
        shape[axis] = bound(shape[axis], bounds)
        found.append(shape[axis])
    return sum(volume(shape[1:]) for shape in dims.values()), tuple(found)


def padded_rows(rows: int, allowed: Sequence[int]) -> int:
    """Return the allowed size that `rows` rows are padded to; a larger request runs in pieces of the largest."""
    if not allowed:
        return rows
    largest = allowed[-1]
    whole, rest = divmod(rows, largest)
    return whole * largest + (allowed[bisect_left(allowed, rest)] if rest else 0)


def rows_to_run(
    rows: int,
    allowed: Sequence[int],
    policy: Literal["min_cost", "pad_up", "batch_down"],
    curve: Curve,
    bucket: int,
    *,
    busy: bool,
) -> int:
    """Return how many of `rows` waiting rows should run now: all of them, padded up, or the next smaller allowed size.

    `min_cost` compares what the curve says, the left-over included: it would run by itself. Where a busy stream stands
    behind, the left-over fills the next batch, so the time per real row decides.
    """
    at = bisect_left(allowed, rows)
    if policy == "pad_up" or at == 0 or at >= len(allowed) or allowed[at] == rows:
        return rows
    up, down = allowed[at], allowed[at - 1]
    if policy == "batch_down":
        return down
    if busy:
        return down if curve.predict(bucket, down) * rows < curve.predict(bucket, up) * down else rows
    rest = padded_rows(rows - down, allowed)
    apart = curve.predict(bucket, down) + curve.predict(bucket, rest)
    return down if apart < curve.predict(bucket, up) else rows
