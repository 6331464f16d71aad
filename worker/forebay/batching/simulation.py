"""A discrete-event simulation of one worker: arrivals go through the real Batcher on a manual clock.

Replicas take the time that a function says; as in the worker, each runs one batch and has at most one staged behind
it. Pure: it knows no Kafka, no model and no clock but its own, so `forebay plan` and the tests may run it anywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from forebay.batching.batcher import Batcher
from forebay.batching.padding import Axes, bucket_of, padded_rows, volume
from forebay.batching.policy import Policy
from forebay.batching.trace import Arrival, Run
from forebay.records import Batch, Encoding, Record, Request

ServiceTime = Callable[[int, int], float]
"""How long a batch runs: (bucket, rows) to seconds. The bucket is the padded elements per row, 0 where none vary."""

_ELEMENT_BYTES = 8
_NEVER = float("inf")
_TURN = 0.001
"""After how long the loop looks again at something that was due already."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What runs the batches. `overhead` is seconds from cut to the earliest start, `queue` requests held in memory.

    `known` is what the batcher knows of the service time at the start: (rows, seconds) by bucket. `axes` are the
    dimensions of the inputs that vary and are padded.
    """

    service: ServiceTime
    replicas: int = 1
    overhead: float = 0.0
    queue: int | None = None
    known: Mapping[int, Sequence[tuple[int, float]]] = field(default_factory=dict)
    axes: Axes = ()


def simulate(arrivals: Sequence[Arrival], policy: Policy, machine: Machine) -> Run:
    """Run the arrivals, which come in order of time, through a Batcher."""
    simulation = _Simulation(arrivals, policy, machine)
    simulation.run()
    return simulation.told()


def optimum(arrivals: Sequence[Arrival], service: ServiceTime, max_rows: int, replicas: int = 1) -> Run:
    """Run the arrivals through the work-conserving reference: a free replica takes what waits, first in, first out.

    It knows no shapes, pays nothing for a batch but its service time, and binds at the very moment of the start.
    """
    run = Run(replicas=replicas, began=arrivals[0].at if arrivals else 0.0)
    free = [0.0] * replicas
    index = 0
    while index < len(arrivals):
        now = max(heapq.heappop(free), arrivals[index].at)
        begin, rows = index, 0
        while index < len(arrivals) and arrivals[index].at <= now and (index == begin or rows < max_rows):
            if index > begin and rows + arrivals[index].rows > max_rows:
                break
            rows += arrivals[index].rows
            index += 1
        seconds = service(0, rows)
        run.latencies += [now + seconds - arrival.at for arrival in arrivals[begin:index]]
        run.sizes.append(rows)
        run.busy += seconds
        run.ended = max(run.ended, now + seconds)
        heapq.heappush(free, now + seconds)
    return run


class _Replica:
    """A replica as the pool sees it: what it runs, what is staged, and when it should be free."""

    __slots__ = ("began", "free_since", "predicted_end", "running", "staged")

    def __init__(self) -> None:
        self.running: Batch | None = None
        self.staged: Batch | None = None
        self.began = 0.0
        self.free_since = 0.0
        self.predicted_end = 0.0


class _Simulation:
    """The state of one run."""

    def __init__(self, arrivals: Sequence[Arrival], policy: Policy, machine: Machine) -> None:
        self._arrivals = arrivals
        self._policy = policy
        self._batcher = Batcher("simulated", policy, axes=machine.axes)
        for bucket, points in machine.known.items():
            self._batcher.curve.seed(points, bucket)
        self._machine = machine
        self._replicas = [_Replica() for _ in range(machine.replicas)]
        self._finishing: list[tuple[float, int, _Replica, float]] = []
        self._next = 0
        self._in_flight = 0
        self._ends: list[float] = [-1.0] * len(arrivals)
        self._run = Run(replicas=machine.replicas, began=arrivals[0].at if arrivals else 0.0)

    def run(self) -> None:
        """Go from event to event until nothing is left to do."""
        now = self._arrivals[0].at if self._arrivals else 0.0
        while True:
            self._finish(now)
            self._receive(now)
            following = self._following(now, self._dispatch(now))
            if following is None:
                break
            now = following

    def told(self) -> Run:
        """Return what happened."""
        self._run.latencies = [
            end - arrival.at for arrival, end in zip(self._arrivals, self._ends, strict=True) if end >= 0
        ]
        self._run.unanswered = len(self._arrivals) - len(self._run.latencies) - self._run.expired
        self._run.ended = max(self._ends, default=0.0)
        return self._run

    def _finish(self, now: float) -> None:
        while self._finishing and self._finishing[0][0] <= now:
            end, _, replica, seconds = heapq.heappop(self._finishing)
            batch = replica.running
            assert batch is not None
            for request in batch.requests:
                if request.deadline is not None and request.deadline <= replica.began:  # it was staged too long
                    self._run.expired += 1
                else:
                    self._ends[request.record.offset] = end
            self._in_flight -= len(batch.requests)
            self._batcher.learned(batch, seconds, end)
            replica.running, replica.free_since = None, end
            if replica.staged is not None:
                staged, replica.staged = replica.staged, None
                self._begin(replica, staged, max(end, staged.cut_at + self._machine.overhead))

    def _receive(self, now: float) -> None:
        """Take in what has arrived, as far as the worker holds requests; the rest waits in the topic."""
        queue = self._machine.queue
        while self._next < len(self._arrivals) and self._arrivals[self._next].at <= now:
            if queue is not None and self._batcher.requests + self._in_flight >= queue:
                return
            arrival = self._arrivals[self._next]
            self._batcher.add(_request(self._next, arrival, now))
            self._next += 1

    def _dispatch(self, now: float) -> float | None:
        """Do what the worker's loop does in a turn: answer what has expired, cut while a replica has room.

        Returns when a replica can begin the next batch, None where none has room.
        """
        batcher = self._batcher
        self._run.expired += len(batcher.expire(now))
        draining = self._next >= len(self._arrivals)
        more = not draining and self._arrivals[self._next].at <= now
        free_at = self._free_at(now)
        while batcher.requests and free_at is not None:
            batch = batcher.cut(now, free_at=free_at, draining=draining, more=more)
            if batch is None:
                break
            self._submit(batch, now)
            free_at = self._free_at(now)
        return free_at

    def _free_at(self, now: float) -> float | None:
        """Return when a replica can begin another batch as far as one can know, None while there is no room."""
        if len(self._replicas) == 1:
            only = self._replicas[0]
            return self._free(only, now) if only.staged is None else None
        return min((self._free(replica, now) for replica in self._replicas if replica.staged is None), default=None)

    def _free(self, replica: _Replica, now: float) -> float:
        return now if replica.running is None else max(replica.predicted_end, now)

    def _submit(self, batch: Batch, now: float) -> None:
        """Give a batch to the replica that is free first."""
        replica = min((one for one in self._replicas if one.staged is None), key=lambda one: self._free(one, now))
        self._in_flight += len(batch.requests)
        if replica.running is None:
            self._begin(replica, batch, now + self._machine.overhead)
        else:
            replica.staged = batch

    def _begin(self, replica: _Replica, batch: Batch, now: float) -> None:
        rows = padded_rows(batch.rows, self._policy.allowed)
        seconds = self._seconds(batch.bucket, rows)
        replica.running = batch
        replica.began = now
        replica.predicted_end = now + (batch.expected or _NEVER)
        self._note(replica, batch, now, seconds)
        self._note_padding(batch, rows)
        heapq.heappush(self._finishing, (now + seconds, self._run.executions, replica, seconds))

    def _seconds(self, bucket: int, rows: int) -> float:
        """Return how long an execution takes; a request larger than a batch runs in pieces."""
        largest = self._policy.bounds.rows
        pieces, rest = divmod(rows, largest) if rows > largest else (0, rows)
        seconds = sum(self._machine.service(bucket, largest) for _ in range(pieces))
        return seconds + (self._machine.service(bucket, rest) if rest else 0.0)

    def _note(self, replica: _Replica, batch: Batch, now: float, seconds: float) -> None:
        run = self._run
        run.sizes.append(batch.rows)
        run.cuts[batch.reason] += 1
        run.busy += seconds
        run.gaps.append(max(0.0, now - max(replica.free_since, min(request.arrived for request in batch.requests))))

    def _note_padding(self, batch: Batch, rows: int) -> None:
        axes, buckets = self._machine.axes, self._policy.buckets
        if not axes:
            return
        inputs = sorted({index for index, _ in axes})
        asked = sum(volume(request.shapes[index]) for request in batch.requests for index in inputs)
        if buckets is not None:
            widest = max(bucket_of(request, axes, buckets)[0] for request in batch.requests)
        else:
            shapes = [[request.shapes[index][1:] for request in batch.requests] for index in inputs]
            widest = sum(volume(map(max, zip(*dims, strict=True))) for dims in shapes)
        self._run.elements += asked
        self._run.computed_elements += rows * widest

    def _following(self, now: float, free_at: float | None) -> float | None:
        """Return the time of the next event; None when all is done."""
        following = self._finishing[0][0] if self._finishing else _NEVER
        if self._next < len(self._arrivals):
            arrives = self._arrivals[self._next].at
            if arrives > now:
                following = min(following, arrives)
        if self._batcher.requests:
            due = self._batcher.next_due(free_at)
            if due is not None:
                following = min(following, due if due > now else now + _TURN)
        return None if following == _NEVER else following


def _request(number: int, arrival: Arrival, now: float) -> Request:
    """Make the request of an arrival; its offset is its number. The worker's clock begins when it takes it in."""
    rows = arrival.rows
    shapes = [(rows, *dims) for dims in arrival.dims] or [(rows,)]
    tensors = [_content(volume(shape)) for shape in shapes]
    return Request(
        record=Record("simulated", arrival.partition, number, None, None, [], 0),
        id="",
        model="simulated",
        rows=rows,
        tensors=tensors,
        shapes=shapes,
        encoding=Encoding.BINARY,
        lane=arrival.kind,
        item_bytes=sum(map(len, tensors)),
        arrived=now,
        deadline=arrival.deadline,
        priority=arrival.priority,
    )


@cache
def _content(elements: int) -> bytes:
    """Return the bytes of a tensor; nobody reads them, so equal ones are shared."""
    return bytes(_ELEMENT_BYTES * elements)
