"""Padded merge: a batch takes requests of other buckets along where running them apart would take longer. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

from forebay.batching.curve import Curve
from forebay.batching.lanes import Lane, Turn
from forebay.batching.sizes import Bounds, Size
from forebay.records import Reason, Request


@dataclass(frozen=True, slots=True)
class Terms:
    """What a merge goes by: the curve, the bounds of a bucket, and whose turn it is in a lane."""

    curve: Curve
    bounds: Callable[[int], Bounds]
    turn: Callable[[Lane], Turn]


def merge(
    lane: Lane, requests: list[Request], lanes: Mapping[Hashable, Lane], terms: Terms
) -> tuple[list[Request], int, Reason | None]:
    """Fill a batch of `lane` up with requests of lanes that differ in nothing but their bucket, nearest bucket first.

    Returns the requests, the bucket that they run in, and the bound that closed the batch. Lane keys are (what must be
    equal, bounds of the ragged dimensions).
    """
    bucket, reason = lane.bucket, None
    rows = sum(request.rows for request in requests)
    others = [
        other
        for key, other in lanes.items()
        if other is not lane and other.rows and key[0] == lane.key[0]  # type: ignore[index]
    ]
    for other in sorted(others, key=lambda one: abs(one.bucket - lane.bucket)):
        joint = max(bucket, other.bucket)
        bounds = terms.bounds(joint)
        joining = min(other.rows, bounds.rows - rows)
        if joining <= 0 or not _is_cheaper(terms, (bucket, rows), other, joining):
            continue
        taken, reason = _take_fitting(other, requests, bounds, terms.turn(other))
        if taken:
            requests, bucket = requests + taken, joint
            rows += sum(request.rows for request in taken)
        if rows >= bounds.rows:
            return requests, bucket, reason or Reason.FULL_ROWS
    return requests, bucket, reason


def _is_cheaper(terms: Terms, batch: tuple[int, int], other: Lane, joining: int) -> bool:
    """Whether a batch (bucket, rows) and rows of another lane are predicted to take less time together than apart.

    Rows of a lane that fills batches by itself would cost their share of a full one; the others an execution.
    """
    curve, (bucket, rows) = terms.curve, batch
    most = terms.bounds(other.bucket).rows
    if other.rows >= most:
        alone = curve.predict(other.bucket, most) * joining / most
    else:
        alone = curve.predict(other.bucket, joining)
    return curve.predict(max(bucket, other.bucket), rows + joining) < curve.predict(bucket, rows) + alone


def _take_fitting(
    other: Lane, requests: list[Request], bounds: Bounds, turn: Turn
) -> tuple[list[Request], Reason | None]:
    """Take what fits into the batch from the front of another lane."""
    size = Size(requests[0])
    for request in requests[1:]:
        size.add(request)
    candidates, reason = other.take(replace(bounds, rows=bounds.rows - size.rows), turn)
    for kept, request in enumerate(candidates):
        exceeded = size.exceeded(request, bounds)
        if exceeded is not None:
            other.put_back(candidates[kept:], turn)
            return candidates[:kept], exceeded
        size.add(request)
    return candidates, reason
