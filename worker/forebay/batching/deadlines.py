"""The deadlines of waiting requests: who can no longer be served in time. Pure; the loop's thread drives it.

A request is late when its deadline has passed, or when the execution that it needs would end after it: it is then
answered at once, however long the batch before it lasts, and costs no forward.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count

from forebay.records import Request


class Deadlines:
    """The waiting requests that have a deadline. `needs` returns the seconds that one request's execution takes."""

    def __init__(self, needs: Callable[[Request], float]) -> None:
        self._needs = needs
        self._heap: list[tuple[float, int, Request]] = []
        self._waiting: set[int] = set()
        self._sequence = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Watch a request that has a deadline."""
        assert request.deadline is not None
        self._waiting.add(id(request))
        heapq.heappush(self._heap, (request.deadline - self._needs(request), next(self._sequence), request))

    def left(self, requests: Iterable[Request]) -> None:
        """Forget requests that wait no more."""
        if self._waiting:
            self._waiting.difference_update(map(id, requests))
            if not self._waiting:
                self._heap.clear()

    def next_due(self) -> float | None:
        """Return when the next request becomes late; a request that was cut may still stand in front."""
        while self._heap and id(self._heap[0][2]) not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def earliest(self) -> float | None:
        """Return the deadline of the request that becomes late first."""
        return None if self.next_due() is None else self._heap[0][2].deadline

    def late(self, now: float) -> list[Request]:
        """Return the requests that can no longer be served in time, and forget them."""
        found: list[Request] = []
        while (due := self.next_due()) is not None and due <= now:
            request = heapq.heappop(self._heap)[2]
            assert request.deadline is not None
            latest = request.deadline - self._needs(request)
            if latest < now or request.deadline <= now:
                self._waiting.discard(id(request))
                found.append(request)
                continue
            heapq.heappush(self._heap, (latest, next(self._sequence), request))
            if latest <= now:  # this very moment it can still be served
                break
        return found
