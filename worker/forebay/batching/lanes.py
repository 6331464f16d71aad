"""A lane: the waiting requests of one model that may share a batch, in order of arrival within each priority.

Pure. The padded size of a candidate batch is kept while it grows, so that bounds are bounds on what is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from forebay.records import Reason, Request


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large a batch may be. `rows` counts rows; `bytes` and `cost` count what padding adds, too."""

    rows: int
    bytes: int
    cost: int | None = None
    cost_unit: Literal["rows", "elements", "bytes"] = "rows"


class Size:
    """The padded size of a batch while it grows: rows, bytes and elements of all its tensors."""

    __slots__ = ("_dims", "_element_bytes", "_padded", "_text_bytes", "rows")

    def __init__(self, first: Request) -> None:
        self.rows = first.rows
        self._text_bytes = _text_bytes(first)
        self._dims = [list(shape[1:]) for shape in first.shapes]
        self._padded = [_volume(dims) for dims in self._dims]
        self._element_bytes = [
            len(tensor) / max(first.rows * volume, 1) if not isinstance(tensor, list) else 0.0
            for tensor, volume in zip(first.tensors, self._padded, strict=True)
        ]

    def grown(self, request: Request) -> tuple[int, float, float]:
        """Return rows, elements and bytes as they would be with `request` in the batch."""
        rows = self.rows + request.rows
        elements, size = 0.0, float(self._text_bytes + _text_bytes(request))
        for dims, shape, volume, width in zip(
            self._dims, request.shapes, self._padded, self._element_bytes, strict=True
        ):
            if tuple(dims) != shape[1:]:
                volume = _volume([max(pair) for pair in zip(dims, shape[1:], strict=True)])
            elements += rows * volume
            size += rows * volume * width
        return rows, elements, size

    def add(self, request: Request) -> None:
        """Take `request` in."""
        self.rows += request.rows
        self._text_bytes += _text_bytes(request)
        for index, (dims, shape) in enumerate(zip(self._dims, request.shapes, strict=True)):
            if tuple(dims) != shape[1:]:
                self._dims[index] = [max(pair) for pair in zip(dims, shape[1:], strict=True)]
                self._padded[index] = _volume(self._dims[index])


def _volume(dims: Iterable[int]) -> int:
    product = 1
    for dim in dims:
        product *= dim
    return product


def _text_bytes(request: Request) -> int:
    """Return the bytes of a request's BYTES tensors: they differ row by row, and nothing pads them."""
    numeric = [len(tensor) for tensor in request.tensors if not isinstance(tensor, list)]
    return request.item_bytes - sum(numeric) if len(numeric) < len(request.tensors) else 0


class Lane:
    """Waiting requests that may share a batch: one queue per priority level, each in order of arrival."""

    __slots__ = ("_queues", "bytes", "key", "model", "ragged", "rows")

    def __init__(self, key: Hashable, model: str, ragged: bool) -> None:
        self.key = key
        self.model = model
        self.ragged = ragged
        self.rows = 0
        self.bytes = 0
        self._queues: dict[int, deque[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        for queue in self._queues.values():
            yield from queue

    def add(self, request: Request) -> None:
        """Append a request to the queue of its priority."""
        queue = self._queues.get(request.priority)
        if queue is None:
            queue = self._queues[request.priority] = deque()
        queue.append(request)
        self.rows += request.rows
        self.bytes += request.item_bytes

    def oldest(self) -> float:
        """Return the arrival of the oldest waiting request, in seconds."""
        return min(queue[0].arrived for queue in self._queues.values() if queue)

    def urgency(self, now: float, aging_seconds: float) -> tuple[float, float]:
        """Return the best effective level of its heads and that head's arrival: smaller is more urgent."""
        return min(_effective(level, queue[0], now, aging_seconds) for level, queue in self._queues.items() if queue)

    def is_full(self, bounds: Bounds) -> bool:
        """Whether what waits fills a batch; padding is left out of account, so it may be full a little earlier."""
        if self.rows >= bounds.rows or self.bytes >= bounds.bytes:
            return True
        if bounds.cost is None:
            return False
        if bounds.cost_unit == "elements":
            return sum(_volume(shape) for request in self for shape in request.shapes) >= bounds.cost
        return (self.rows if bounds.cost_unit == "rows" else self.bytes) >= bounds.cost

    def take(self, bounds: Bounds, now: float, aging_seconds: float) -> tuple[list[Request], Reason | None]:
        """Remove and return the requests of the next batch, and which bound closed it (None: the lane ran empty).

        A request that is larger than a bound by itself travels alone.
        """
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            if not self.ragged and bounds.cost is None:
                return self._take_uniform(queue, bounds)
        return self._take_general(bounds, now, aging_seconds)

    def _take_uniform(self, queue: deque[Request], bounds: Bounds) -> tuple[list[Request], Reason | None]:
        """The common case: one priority and one shape, so rows and bytes are plain sums."""
        taken: list[Request] = []
        rows = size = 0
        reason: Reason | None = None
        while queue:
            request = queue[0]
            rows += request.rows
            size += request.item_bytes
            if rows > bounds.rows or size > bounds.bytes:
                if taken:
                    rows -= request.rows
                    size -= request.item_bytes
                    reason = Reason.FULL_ROWS if rows + request.rows > bounds.rows else Reason.FULL_BYTES
                    break
                reason = Reason.FULL_ROWS if rows > bounds.rows else Reason.FULL_BYTES
                taken.append(queue.popleft())
                break
            taken.append(queue.popleft())
            if rows == bounds.rows:
                reason = Reason.FULL_ROWS
                break
        self.rows -= rows
        self.bytes -= size
        return taken, reason

    def _take_general(self, bounds: Bounds, now: float, aging_seconds: float) -> tuple[list[Request], Reason | None]:
        taken: list[Request] = []
        size: Size | None = None
        reason: Reason | None = None
        while reason is None:
            queues = [(level, queue) for level, queue in self._queues.items() if queue]
            if not queues:
                break
            queue = min(queues, key=lambda pair: _effective(pair[0], pair[1][0], now, aging_seconds))[1]
            request = queue[0]
            if size is None:
                size = Size(request)
            else:
                reason = _exceeded(size.grown(request), bounds)
                if reason is not None:
                    break
                size.add(request)
            taken.append(queue.popleft())
            if size.rows >= bounds.rows:
                reason = Reason.FULL_ROWS
        self.rows -= sum(request.rows for request in taken)
        self.bytes -= sum(request.item_bytes for request in taken)
        return taken, reason

    def remove(self, gone: set[int]) -> list[Request]:
        """Remove and return the requests whose `id()` is in `gone`."""
        removed: list[Request] = []
        for level, queue in self._queues.items():
            removed += [request for request in queue if id(request) in gone]
            self._queues[level] = deque(request for request in queue if id(request) not in gone)
        self.rows -= sum(request.rows for request in removed)
        self.bytes -= sum(request.item_bytes for request in removed)
        return removed


def _effective(level: int, head: Request, now: float, aging_seconds: float) -> tuple[float, float]:
    """Rank a queue: its level, one better for each aging period that its head has waited; then by arrival."""
    steps = int((now - head.arrived) / aging_seconds) if aging_seconds > 0 else 0
    return (max(level - steps, 1), head.arrived)


def _exceeded(grown: tuple[int, float, float], bounds: Bounds) -> Reason | None:
    rows, elements, size = grown
    if rows > bounds.rows:
        return Reason.FULL_ROWS
    if size > bounds.bytes:
        return Reason.FULL_BYTES
    if bounds.cost is not None:
        cost = {"rows": float(rows), "elements": elements, "bytes": size}[bounds.cost_unit]
        if cost > bounds.cost:
            return Reason.FULL_COST
    return None
