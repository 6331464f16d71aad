"""A lane: the waiting requests of one model that may share a batch without waste. Pure.

Inside a lane there are priority levels, inside a level flows (partitions or tenants), inside a flow the order of
arrival. Requests of ragged inputs lie in lanes by the bucket of their lengths, so that neighbours pad little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from forebay.batching.flows import Accounts, Flow, flow_of
from forebay.batching.sizes import Bounds, Size
from forebay.records import Reason, Request

_Level = dict[Flow, deque[Request]]


@dataclass(frozen=True, slots=True)
class Turn:
    """What decides whose turn it is: the clock, the ageing of priorities, and the accounts of the flows.

    `row_seconds` is what a row of this lane is charged.
    """

    now: float
    aging: float
    accounts: Accounts
    row_seconds: float = 1.0


class Lane:
    """Waiting requests that may share a batch. `weigh` returns a request's cost, unpadded, where cost is bounded."""

    __slots__ = ("_levels", "_ragged", "_weigh", "bucket", "bytes", "cost", "key", "rows")

    def __init__(
        self,
        key: Hashable,
        bucket: int = 0,
        *,
        ragged: bool = False,
        weigh: Callable[[Request], float] | None = None,
    ) -> None:
        self.key = key
        self.bucket = bucket
        self.rows = 0
        self.bytes = 0
        self.cost = 0.0
        self._ragged = ragged
        self._weigh = weigh
        self._levels: dict[int, _Level] = {}

    def __len__(self) -> int:
        return sum(len(queue) for level in self._levels.values() for queue in level.values())

    def __iter__(self) -> Iterator[Request]:
        for level in self._levels.values():
            for queue in level.values():
                yield from queue

    def add(self, request: Request) -> None:
        """Append a request behind those of its priority and flow. Runs per request: what is there is found inline."""
        record, tenant = request.record, request.tenant
        try:
            queue = self._levels[request.priority][(record.topic, record.partition) if tenant is None else tenant]
        except KeyError:
            queue = self._queue_of(request)
        queue.append(request)
        self.rows += request.rows
        self.bytes += request.item_bytes
        if self._weigh is not None:
            self.cost += self._weigh(request)

    def put_back(self, requests: list[Request], turn: Turn) -> None:
        """Take requests back that were taken last, in their order, and refund their flows."""
        for request in reversed(requests):
            self._queue_of(request).appendleft(request)
            turn.accounts.charge(flow_of(request), -request.rows * turn.row_seconds)
        self._count(requests, 1)

    def oldest(self) -> float:
        """Return the arrival of the oldest waiting request, in seconds."""
        return min(map(_oldest, self._levels.values()))

    def urgency(self, now: float, aging: float) -> tuple[float, float]:
        """Return the best effective level of its heads and that head's arrival: smaller is more urgent."""
        return min(_rank(number, level, now, aging) for number, level in self._levels.items())

    def full(self, bounds: Bounds) -> Reason | None:
        """Say which bound what waits fills; padding is left out of account, so it may be full a little earlier."""
        if self.rows >= bounds.rows:
            return Reason.FULL_ROWS
        if self.bytes >= bounds.bytes:
            return Reason.FULL_BYTES
        return Reason.FULL_COST if bounds.cost is not None and self.cost >= bounds.cost else None

    def take(self, bounds: Bounds, turn: Turn) -> tuple[list[Request], Reason | None]:
        """Remove and return the requests of the next batch, and which bound closed it (None: the lane ran empty).

        A request that is larger than a bound by itself travels alone.
        """
        if len(self._levels) == 1 and not self._ragged and bounds.cost is None:
            return self._take_uniform(bounds, turn)
        taken, reason = self._take_general(bounds, turn)
        self._count(taken, -1)
        return taken, reason

    def remove(self, gone: set[int]) -> list[Request]:
        """Remove and return the requests whose `id()` is in `gone`."""
        removed: list[Request] = []
        for number, level in list(self._levels.items()):
            for flow, queue in list(level.items()):
                found = [request for request in queue if id(request) in gone]
                if found:
                    removed += found
                    level[flow] = deque(request for request in queue if id(request) not in gone)
                    self._tidy(number, flow)
        self._count(removed, -1)
        return removed

    def _queue_of(self, request: Request) -> deque[Request]:
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = {}
        flow = flow_of(request)
        queue = level.get(flow)
        if queue is None:
            queue = level[flow] = deque()
        return queue

    def _count(self, requests: list[Request], sign: int) -> None:
        self.rows += sign * sum([request.rows for request in requests])
        self.bytes += sign * sum([request.item_bytes for request in requests])
        if self._weigh is not None:
            self.cost += sign * sum(map(self._weigh, requests))

    def _tidy(self, number: int, flow: Flow) -> None:
        level = self._levels[number]
        if not level[flow]:
            del level[flow]
            if not level:
                del self._levels[number]

    def _take_uniform(self, bounds: Bounds, turn: Turn) -> tuple[list[Request], Reason | None]:
        """The common case: one priority and one shape, so rows and bytes are plain sums. Flows give in portions."""
        ((number, level),) = self._levels.items()
        taken: list[Request] = []
        rows = size = 0
        portion = max(bounds.rows // (2 * len(level)), 1) if len(level) > 1 else bounds.rows
        slack = bounds.rows * turn.row_seconds
        reason: Reason | None = None
        most_rows, most_bytes = bounds.rows, bounds.bytes
        while level and reason is None:
            flow = turn.accounts.next(level, slack)
            queue = level[flow]
            start, end = rows, rows + portion
            while queue and rows < end:
                request = queue[0]
                rows += request.rows
                size += request.item_bytes
                if rows > most_rows or size > most_bytes:
                    reason = Reason.FULL_ROWS if rows > most_rows else Reason.FULL_BYTES
                    if taken:
                        rows -= request.rows
                        size -= request.item_bytes
                        break
                taken.append(queue.popleft())
                if reason is not None or rows >= most_rows:
                    reason = reason or Reason.FULL_ROWS
                    break
            turn.accounts.charge(flow, (rows - start) * turn.row_seconds)
            self._tidy(number, flow)
        self.rows -= rows
        self.bytes -= size
        return taken, reason

    def _take_general(self, bounds: Bounds, turn: Turn) -> tuple[list[Request], Reason | None]:
        """Request by request: the most urgent level, in it the flow whose turn it is, under padded bounds."""
        taken: list[Request] = []
        size: Size | None = None
        slack = bounds.rows * turn.row_seconds
        while self._levels:
            number = min(self._levels, key=lambda level: _rank(level, self._levels[level], turn.now, turn.aging))
            level = self._levels[number]
            flow = turn.accounts.next(level, slack)
            request = level[flow][0]
            if size is None:
                size = Size(request)
            else:
                reason = size.exceeded(request, bounds)
                if reason is not None:
                    return taken, reason
                size.add(request)
            taken.append(level[flow].popleft())
            turn.accounts.charge(flow, request.rows * turn.row_seconds)
            self._tidy(number, flow)
            if size.rows >= bounds.rows:
                return taken, Reason.FULL_ROWS
        return taken, None


def _oldest(level: _Level) -> float:
    return min([queue[0].arrived for queue in level.values()])


def _rank(number: int, level: _Level, now: float, aging: float) -> tuple[float, float]:
    """Rank a level: its number, one better for each ageing period that its oldest head waited; then by arrival."""
    oldest = _oldest(level)
    steps = int((now - oldest) / aging) if aging > 0 else 0
    return (max(number - steps, 1), oldest)
