"""The preparers: processes of their own that run a model's `prepare` before batching, as the loop sees them. No torch.

Requests wait here by priority and age, go out a few at a time through shared memory, and come back with the tensors
that the model is going to get, so that the batcher knows their true shapes. Underneath is a pool of another kind: a
preparer that dies or hangs is replaced, and the requests that it held run again one by one. The loop's thread owns it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from forebay.breaker import Breakers
from forebay.inference.matching import Finished
from forebay.inference.pool import Pool
from forebay.records import Batch, Code, Failure, Output, Reason, Request, TensorShape, lane_of

TARGET_SECONDS = 0.004
"""What one message is worth in work: long enough to hide its way, short enough to share work out evenly."""

MOST_REQUESTS = 64
MOST_BYTES = 4 * 2**20
_WEIGHT = 0.2
_NEVER = float("inf")

_Entry = tuple[float, int, Request]


@dataclass(slots=True)
class Prepared:
    """What came back: requests that are ready for a batch, those that are not going to be, and what each took."""

    ready: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, Failure]] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)


class Preparers:
    """The requests of every model that wait for `prepare` or are in it. `aging` is in seconds per priority level."""

    def __init__(
        self, pool: Pool, aging: float, numbers: Iterator[int] | None = None, breakers: Breakers | None = None
    ) -> None:
        self.pool = pool
        self.breakers = Breakers(enabled=False) if breakers is None else breakers
        self._aging = aging
        self._numbers = numbers or count(1)
        self._sequence = count()
        self._waiting: dict[str, list[_Entry]] = {}
        self._seconds: dict[str, float] = {}
        self._due = _NEVER

    @property
    def waiting(self) -> int:
        """Requests that no preparer has yet."""
        return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        """Requests that preparers have."""
        return self.pool.in_flight

    @property
    def requests(self) -> int:
        """Requests that are not prepared yet; costs next to nothing where there never was one."""
        return self.waiting + self.running if self._waiting else 0

    @property
    def stuck(self) -> int:
        """Requests that wait for a model that fails to prepare its own example."""
        return sum(len(queue) for model, queue in self._waiting.items() if self.breakers.is_open(_breaker_of(model)))

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests that are not prepared yet, in no particular order."""
        for queue in self._waiting.values():
            yield from (request for _, _, request in queue)
        yield from self.pool

    def add(self, request: Request) -> None:
        """Let a request wait for its preparation: behind older and more urgent ones, and for ever behind none."""
        if request.deadline is not None and request.deadline < self._due:
            self._due = request.deadline
        rank = request.arrived + request.priority * self._aging
        heapq.heappush(self._waiting.setdefault(request.model, []), (rank, next(self._sequence), request))

    def collect(self, now: float, *, hold: bool = False) -> Prepared:
        """Return what the preparers have done, and send them more, unless `hold` says that enough is prepared already.

        A request whose deadline passed meanwhile is among the failed. Never waits. Raises ModelError where a model
        cannot start, DeviceLostError where preparers keep dying.
        """
        back = Prepared()
        for finished in self.pool.collect(now):
            self._take(finished, back, now)
        if now >= self._due:
            late = Failure(Code.DEADLINE_EXCEEDED, "the deadline passed before the request was prepared")
            back.failed += [(request, late) for request in self._take_out(lambda request: _is_late(request, now))]
            deadlines = [entry[2].deadline for queue in self._waiting.values() for entry in queue]
            self._due = min((deadline for deadline in deadlines if deadline is not None), default=_NEVER)
        if not hold:
            self._feed(now)
        return back

    def switch(self, model: str, now: float) -> None:
        """Let the successors of a model's preparers take over; what the others had begun is begun anew."""
        self.pool.switch(model, now)
        for request in self.pool.recall(model):
            self.add(request)
        self._seconds.pop(model, None)
        self.breakers.retry(_breaker_of(model))

    def drop(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        """Remove and return the requests that `unwanted` picks; what a preparer makes of those it has goes nowhere."""
        return self.pool.forsake(unwanted) + self._take_out(unwanted)

    def _take_out(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        gone: list[Request] = []
        for model, queue in self._waiting.items():
            picked = [request for _, _, request in queue if unwanted(request)]
            if picked:
                gone += picked
                self._waiting[model] = [entry for entry in queue if not unwanted(entry[2])]
                heapq.heapify(self._waiting[model])
        return gone

    def _take(self, finished: Finished, back: Prepared, now: float) -> None:
        model, tells = finished.batch.model, finished.timings.total > 0
        if self.breakers.holds(_breaker_of(model), finished.unsound, tells=tells, now=now):
            for request, _ in finished.failures:
                self.add(request)
            return
        if finished.seconds:
            back.seconds.setdefault(model, []).extend(finished.seconds)
            mean = sum(finished.seconds) / len(finished.seconds)
            before = self._seconds.get(model, mean)
            self._seconds[model] = before + _WEIGHT * (mean - before)
        costs: dict[int, float] = {}
        if any(finished.costs):
            costs = {id(r): cost for r, cost in zip(finished.batch.requests, finished.costs, strict=True) if cost}
        specs = self.pool.signatures[model].outputs
        for requests, outputs in reversed(finished.results):  # a pool looks from the last part to the first
            request = requests[0]  # each is a part of its own
            back.ready.append(_prepared(request, specs, outputs, costs.get(id(request))))
        back.failed += finished.failures

    def _feed(self, now: float) -> None:
        for model, queue in self._waiting.items():
            breaker = _breaker_of(model)
            while queue and self.pool.free_at(model) is not None and self.breakers.lets(breaker, now):
                requests = self._cut(model, queue)
                rows = sum(request.rows for request in requests)
                self.pool.submit(Batch(next(self._numbers), model, requests, rows, Reason.IDLE, now), now)
                self.breakers.began(breaker, now)

    def _cut(self, model: str, queue: list[_Entry]) -> list[Request]:
        """Take the next few requests: as many as keep a preparer busy for a moment."""
        most = max(min(int(TARGET_SECONDS / max(self._expected(model), 1e-9)), MOST_REQUESTS), 1)
        taken: list[Request] = []
        size = 0
        while queue and len(taken) < most:
            request = queue[0][2]
            size += request.item_bytes
            if taken and size > MOST_BYTES:
                break
            taken.append(heapq.heappop(queue)[2])
        return taken

    def _expected(self, model: str) -> float:
        """Return the seconds that a request takes: as measured, else as the model's example did."""
        measured = self._seconds.get(model)
        if measured is not None:
            return measured
        return next((seconds for _, _, seconds in self.pool.curves.get(model, ())), TARGET_SECONDS)


def _breaker_of(model: str) -> str:
    return f"{model} (prepare)"


def _is_late(request: Request, now: float) -> bool:
    return request.deadline is not None and request.deadline <= now


def _prepared(request: Request, specs: tuple[TensorShape, ...], outputs: list[Output], cost: float | None) -> Request:
    """Return a request as it goes on: its tensors, shapes, lane and size are those that `prepare` gave it."""
    shapes = tuple((request.rows, *output.dims) for output in outputs)
    tensors = [output.content for output in outputs]
    return replace(
        request,
        tensors=tensors,
        shapes=shapes,
        lane=lane_of(request.model, specs, shapes),
        item_bytes=sum(_size(tensor) for tensor in tensors),
        cost=cost,
    )


def _size(tensor: bytes | list[bytes]) -> int:
    return sum(map(len, tensor)) + 4 * len(tensor) if isinstance(tensor, list) else len(tensor)
