"""The batcher: gathers the requests of one model into lanes and cuts batches from them. Pure; the loop drives it.

Three dispatch modes. `eager` is work-conserving: a free replica takes whatever waits. `linger` waits for a fuller
batch, at most `max_wait` from the arrival of the oldest request. `static` runs full batches only. Ahead of a busy
replica only full batches are cut: members of a full batch gain nothing from waiting, those of a partial one do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

from forebay.batching.lanes import Bounds, Lane
from forebay.records import Batch, Reason, Request


@dataclass(frozen=True, slots=True)
class Policy:
    """How batches are cut; times are seconds."""

    bounds: Bounds
    dispatch: Literal["eager", "linger", "static"] = "eager"
    max_wait: float = 0.0
    priority_aging: float = 1.0


class Batcher:
    """The waiting requests of one model."""

    def __init__(self, model: str, policy: Policy, numbers: Iterator[int] | None = None) -> None:
        self.model = model
        self.policy = policy
        self.requests = 0
        self.bytes = 0
        self._lanes: dict[Hashable, Lane] = {}
        self._numbers = numbers or count(1)
        self._deadlines: list[tuple[float, int, Request]] = []
        self._dated: set[int] = set()
        self._sequence = count()

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests that wait, in no particular order."""
        return (request for lane in self._lanes.values() for request in lane)

    def add(self, request: Request, *, ragged: bool = False) -> None:
        """Let a request wait. `ragged` says that shapes inside its lane may differ and are padded."""
        lane = self._lanes.get(request.lane)
        if lane is None:
            lane = self._lanes[request.lane] = Lane(request.lane, self.model, ragged)
        lane.add(request)
        self.requests += 1
        self.bytes += request.item_bytes
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, next(self._sequence), request))
            self._dated.add(id(request))

    def cut(self, now: float, *, idle: bool, draining: bool = False) -> Batch | None:
        """Return the next batch if one should run now.

        `idle` says that a replica has nothing to do; otherwise there is only a place ahead of a busy one.
        """
        if not self.requests:
            return None
        lane = self._next_lane(now, idle=idle, draining=draining)
        if lane is None:
            return None
        requests, bound = lane.take(self.policy.bounds, now, self.policy.priority_aging)
        if not len(lane):
            del self._lanes[lane.key]
        self._left(requests)
        rows = sum([request.rows for request in requests])
        reason = bound or self._why(draining)
        return Batch(next(self._numbers), self.model, requests, rows, reason, now)

    def next_due(self) -> float | None:
        """Return the time at which `cut` or `expire` may have something to do without a new arrival."""
        due = self._deadlines[0][0] if self._deadlines else None
        if self.policy.dispatch == "linger" and self._lanes:
            linger = min(lane.oldest() for lane in self._lanes.values()) + self.policy.max_wait
            due = linger if due is None else min(due, linger)
        return due

    def expire(self, now: float) -> list[Request]:
        """Remove and return the waiting requests whose deadline has passed."""
        late: dict[int, Request] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if id(request) in self._dated:
                late[id(request)] = request
        if late:
            self._remove(set(late))
        return list(late.values())

    def drop(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        """Remove and return the waiting requests that `unwanted` picks."""
        picked = [request for lane in self._lanes.values() for request in lane if unwanted(request)]
        if picked:
            self._remove({id(request) for request in picked})
        return picked

    def _remove(self, gone: set[int]) -> None:
        for key, lane in list(self._lanes.items()):
            self._left(lane.remove(gone))
            if not len(lane):
                del self._lanes[key]

    def _left(self, requests: list[Request]) -> None:
        self.requests -= len(requests)
        self.bytes -= sum([request.item_bytes for request in requests])
        if self._dated:
            self._dated.difference_update(map(id, requests))
            if not self._dated:
                self._deadlines.clear()

    def _next_lane(self, now: float, *, idle: bool, draining: bool) -> Lane | None:
        """Choose the most urgent lane among those that may be cut now."""
        lanes: list[Lane] = list(self._lanes.values())
        if not idle or (self.policy.dispatch == "static" and not draining):
            lanes = [lane for lane in lanes if lane.is_full(self.policy.bounds)]
        elif self.policy.dispatch == "linger" and not draining:
            overdue = now - self.policy.max_wait
            lanes = [lane for lane in lanes if lane.oldest() <= overdue or lane.is_full(self.policy.bounds)]
        if len(lanes) < 2:
            return lanes[0] if lanes else None
        aging = self.policy.priority_aging
        return min(lanes, key=lambda lane: (*lane.urgency(now, aging), -lane.rows))

    def _why(self, draining: bool) -> Reason:
        if draining:
            return Reason.DRAIN
        return Reason.LINGER_EXPIRED if self.policy.dispatch == "linger" else Reason.IDLE
