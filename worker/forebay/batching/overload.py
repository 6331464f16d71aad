"""Deadlines under pressure: which requests a batch should serve where it cannot serve all in time. Pure.

To shrink a batch until its most urgent request is in time saves that one; done again and again under overload it makes
small batches just when throughput is needed, and nearly everybody is late. So several sizes are weighed: the urgent
ones in a small batch, or a larger batch without them. For each it is counted how many of those that wait would be
served in time, if full batches followed; most wins, and among equals the one that sheds nobody.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.batching.sizes import Bounds, Size, weigher
from forebay.records import Request

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """The requests that run, the most urgent first, and those that have no chance left."""

    members: list[Request]
    shed: list[Request]


def choose(waiting: Sequence[Request], start: float, bounds: Bounds, seconds: Callable[[int], float]) -> Choice:
    """Choose from the requests that wait in a lane. `seconds` is the time of an execution of some rows.

    `start` is when it can begin. One request that exceeds a bound by itself is a batch of its own.
    """
    order = sorted(waiting, key=lambda request: _NEVER if request.deadline is None else request.deadline)
    deadlines = [_NEVER if request.deadline is None else request.deadline for request in order]
    rows = sum(request.rows for request in order) / len(order)
    room = _room(order, bounds)
    best: tuple[int, int, int] | None = None
    for count in _counts(min(room, len(order))):
        skipped = bisect_left(deadlines, start + seconds(round(count * rows)))
        served = min(count, len(order) - skipped)
        if not served:
            continue
        end = start + seconds(round(served * rows))
        later = _served_later(deadlines, skipped + served, end, room, lambda n: seconds(round(n * rows)))
        found = (served + later, -skipped, served)
        if best is None or found > best:
            best = found
    if best is None:  # nobody is in time by the 95th percentile: the most urgent one may be lucky
        return Choice(order[:1], [])
    _, skipped, served = best
    while served < min(room, len(order) + skipped) and (
        start + seconds(round((served + 1) * rows)) <= deadlines[-skipped]
    ):
        served += 1  # the sizes that were weighed have gaps between them
    members = order[-skipped : -skipped + served]
    size = Size(members[0])
    for kept, request in enumerate(members[1:], 1):
        if size.exceeded(request, bounds) is not None:
            return Choice(members[:kept], order[:-skipped])
        size.add(request)
    return Choice(members, order[:-skipped])


def _room(waiting: Sequence[Request], bounds: Bounds) -> int:
    """Return how many requests of average size a batch holds, by whichever bound is the nearest."""
    count = len(waiting)
    rooms = [
        bounds.rows * count / sum([request.rows for request in waiting]),
        bounds.bytes * count / max(sum([request.item_bytes for request in waiting]), 1),
    ]
    if bounds.cost is not None:
        rooms.append(bounds.cost * count / max(sum(map(weigher(bounds), waiting)), 1e-9))
    return max(int(min(rooms)), 1)


def _counts(most: int) -> list[int]:
    """Return the sizes to weigh: `most`, and five per halving below it."""
    found = {most}
    size = float(most)
    while size > 1:
        size *= 0.87
        found.add(max(round(size), 1))
    return sorted(found, reverse=True)


def _served_later(
    deadlines: Sequence[float], begin: int, start: float, room: int, seconds: Callable[[int], float]
) -> int:
    """Return how many of the sorted deadlines from `begin` on are met by full batches, one after the other."""
    served = 0
    while begin < len(deadlines):
        end = start + seconds(min(room, len(deadlines) - begin))
        begin = bisect_left(deadlines, end, begin)  # these are late whatever runs
        count = min(room, len(deadlines) - begin)
        if not count:
            break
        served += count
        start += seconds(count)
        begin += count
    return served
