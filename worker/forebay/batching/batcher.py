"""The batcher: gathers the requests of one model into lanes and cuts batches from them. Pure; the loop drives it.

Four dispatch modes. `eager` is work-conserving: a free replica takes whatever waits. `linger` waits for a fuller
batch, at most `max_wait` from the arrival of the oldest request. `static` runs full batches only. `defer` waits as long
as the deadlines allow. In all of them a batch is bound late: while a replica computes, what waits goes on growing until
just before the predicted end; only a full batch, which gains nothing from waiting, is staged earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import count

from forebay.batching import merging, overload
from forebay.batching.caps import Caps
from forebay.batching.curve import Curve
from forebay.batching.deadlines import Deadlines
from forebay.batching.flows import Accounts
from forebay.batching.lanes import Lane, Turn
from forebay.batching.padding import Axes, bucket_of, padded_rows, rows_to_run, volume
from forebay.batching.policy import Policy
from forebay.batching.sizes import Bounds, weigher
from forebay.records import Batch, Reason, Request

NEVER = float("inf")


class Batcher:
    """The waiting requests of one model. `axes` are the ragged dimensions of its inputs."""

    def __init__(self, model: str, policy: Policy, numbers: Iterator[int] | None = None, axes: Axes = ()) -> None:
        self.model = model
        self.policy = policy
        self.curve = Curve()
        self.caps = Caps(policy, self.curve)
        self.requests = 0
        self.bytes = 0
        self._axes = axes
        self._ragged = sorted({index for index, _ in axes})
        self._lanes: dict[Hashable, Lane] = {}
        self._numbers = numbers or count(1)
        self._accounts = Accounts()
        self._deadlines = Deadlines(self._needs)
        self._shed: list[Request] = []
        self._lead = 0.0
        self._limits = replace(policy.bounds, allowed=policy.allowed, lengths=policy.buckets or (), ragged=axes)
        self._weigh = None if policy.bounds.cost is None else weigher(policy.bounds)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests that wait, in no particular order."""
        yield from self._shed
        for lane in self._lanes.values():
            yield from lane

    def add(self, request: Request) -> None:
        """Let a request wait."""
        key, bucket = request.lane, 0
        if self._axes:
            bucket, dims = bucket_of(request, self._axes, self.policy.buckets)
            key = (key, dims)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key, bucket, ragged=bool(self._axes), weigh=self._weigh)
        lane.add(request)
        self.requests += 1
        self.bytes += request.item_bytes
        if request.deadline is not None:
            self._deadlines.add(request)

    def cut(self, now: float, *, free_at: float, draining: bool = False, more: bool = True) -> Batch | None:
        """Return the next batch if one should be bound now.

        `free_at` is the time at which a replica can begin it; up to `now` means that one is idle. `more` says that
        the topics are known to hold more requests.
        """
        if not self.requests:
            return None
        lane = self._most_urgent(now)
        reason = self._ripe(lane, now, free_at, draining=draining, more=more)
        if reason is None:
            return None
        requests, bound = lane.take(self._bounds(lane.bucket), self._turn(lane, now))
        bucket = lane.bucket
        if bound is None and self._axes and len(self._lanes) > 1:
            requests, bucket, bound = merging.merge(lane, requests, self._lanes, self._merging(now))
        pressed: Reason | None = None
        shed: list[Request] = []
        if self._deadlines:
            requests, pressed, shed = self._in_time(lane, requests, bucket, now, free_at)
            if not requests:
                return None
        requests, shorter = self._sized(lane, requests, bucket, now, more and not draining)
        reason = Reason.STEP if self.policy.joins else pressed or shorter or bound or reason
        rows = sum([one.rows for one in requests])
        dated = [one.deadline for one in requests if one.deadline is not None] if self._deadlines else []
        self._left([*requests, *shed] if shed else requests)
        expected = self.curve.predict(bucket, padded_rows(rows, self.policy.allowed))
        self._lead = min(self.policy.lead, self.policy.lead_share * expected)
        deadline = min(dated, default=None)
        return Batch(next(self._numbers), self.model, requests, rows, reason, now, bucket, expected, deadline)

    def next_due(self, free_at: float | None) -> float | None:
        """Return when `cut` or `expire` may have something to do without a new arrival; None: never.

        `free_at` as for `cut`, None where no replica has room.
        """
        due = 0.0 if self._shed else self._deadlines.next_due()
        if free_at is not None and self.requests:
            ripe = max(min(map(self._ripe_at, self._lanes.values())), free_at - self._lead)
            if ripe < NEVER:
                due = ripe if due is None else min(due, ripe)
        return due

    def expire(self, now: float) -> list[Request]:
        """Remove and return the waiting requests that cannot be served by their deadline any more."""
        if not self._deadlines and not self._shed:
            return []
        late = self._deadlines.late(now)
        if late:
            self._remove({id(request) for request in late})
        shed, self._shed = self._shed, []
        return shed + late

    def drop(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        """Remove and return the waiting requests that `unwanted` picks."""
        picked = [request for lane in self._lanes.values() for request in lane if unwanted(request)]
        if picked:
            self._remove({id(request) for request in picked})
        shed = [request for request in self._shed if unwanted(request)]
        self._shed = [request for request in self._shed if not unwanted(request)]
        return picked + shed

    def learned(self, batch: Batch, seconds: float, now: float) -> None:
        """Learn the service time of a batch that ran in one execution."""
        self.curve.observe(batch.bucket, padded_rows(batch.rows, self.policy.allowed), seconds, now)

    def padding(self, batch: Batch) -> tuple[int, int]:
        """Return the elements of a batch's ragged inputs, and those that only pad them."""
        if not self._axes:
            return 0, 0
        real = sum([volume(one.shapes[index]) for one in batch.requests for index in self._ragged])
        if self.policy.buckets:
            return real, batch.bucket * padded_rows(batch.rows, self.policy.allowed) - real
        longest = [
            map(max, zip(*[one.shapes[index][1:] for one in batch.requests], strict=True)) for index in self._ragged
        ]
        return real, sum(map(volume, longest)) * padded_rows(batch.rows, self.policy.allowed) - real

    def _needs(self, request: Request) -> float:
        """Return the seconds that a request needs at least: an execution of its own."""
        bucket = bucket_of(request, self._axes, self.policy.buckets)[0] if self._axes else 0
        return self.curve.predict(bucket, padded_rows(request.rows, self.policy.allowed))

    def _remove(self, gone: set[int]) -> None:
        self._left([request for lane in self._lanes.values() for request in lane.remove(gone)])

    def _left(self, requests: list[Request]) -> None:
        """Count requests out that wait no more."""
        self.requests -= len(requests)
        self._lanes = {key: lane for key, lane in self._lanes.items() if len(lane)}
        self.bytes = sum([lane.bytes for lane in self._lanes.values()])
        self._deadlines.left(requests)

    def _bounds(self, bucket: int) -> Bounds:
        bounds = self._limits
        rows = self.caps.rows(bucket)
        if self.policy.allowed:
            rows = max([size for size in self.policy.allowed if size <= rows], default=self.policy.allowed[0])
        return bounds if rows == bounds.rows else replace(bounds, rows=rows)

    def _turn(self, lane: Lane, now: float) -> Turn:
        rows = max(min(lane.rows, self.policy.bounds.rows), 1)
        seconds = self.curve.predict(lane.bucket, rows) / rows
        return Turn(now, self.policy.priority_aging, self._accounts, seconds or 1.0)

    def _merging(self, now: float) -> merging.Terms:
        return merging.Terms(self.curve, self._bounds, lambda lane: self._turn(lane, now))

    def _most_urgent(self, now: float) -> Lane:
        """Choose the lane: ripe ones first, then the oldest head; among heads alike, the fullest."""
        lanes = list(self._lanes.values())
        if len(lanes) == 1:
            return lanes[0]
        if self.policy.dispatch != "eager":
            ripe = [lane for lane in lanes if self._ripe_at(lane) <= now]
            lanes = ripe or lanes
        ranked = {id(lane): lane.urgency(now, self.policy.priority_aging) for lane in lanes}
        level, arrived = min(ranked.values())
        alike = []
        for lane in lanes:
            its_level, its_arrival = ranked[id(lane)]
            if its_level == level and its_arrival - arrived <= self.curve.predict(lane.bucket, 1):
                alike.append(lane)
        return max(alike, key=lambda lane: (lane.rows, -ranked[id(lane)][1]))

    def _ripe(self, lane: Lane, now: float, free_at: float, *, draining: bool, more: bool) -> Reason | None:
        """Say why a lane should be cut now; None: its requests gain by waiting."""
        full = lane.full(self._bounds(lane.bucket))
        if full is not None:
            return full
        if now < free_at - self._lead:
            return None
        if draining:
            return Reason.DRAIN
        dispatch = self.policy.dispatch
        if dispatch == "eager":
            return Reason.IDLE
        if dispatch == "linger" and not more:
            if self.policy.backlog_only:
                return Reason.IDLE
            if lane.rows in self.policy.allowed:
                return Reason.ALLOWED_SIZE
        if now < self._ripe_at(lane):
            return None
        return Reason.DEADLINE if dispatch == "defer" or now < self._lingers_until(lane) else Reason.LINGER_EXPIRED

    def _ripe_at(self, lane: Lane) -> float:
        """Return when a lane should be cut at the latest, full or not."""
        dispatch = self.policy.dispatch
        if dispatch == "eager" or lane.full(self._bounds(lane.bucket)) is not None:
            return 0.0
        if dispatch == "static":
            return NEVER
        until = self._lingers_until(lane) if dispatch == "linger" else NEVER
        earliest = self._deadlines.earliest()
        if earliest is not None:
            rows = padded_rows(min(lane.rows + 1, self.policy.bounds.rows), self.policy.allowed)
            until = min(until, earliest - self.curve.high(lane.bucket, rows) - self.policy.margin)
        return until

    def _lingers_until(self, lane: Lane) -> float:
        return lane.oldest() + self.policy.max_wait

    def _in_time(
        self, lane: Lane, requests: list[Request], bucket: int, now: float, free_at: float
    ) -> tuple[list[Request], Reason | None, list[Request]]:
        """Choose anew where a batch would end after a deadline in it; under overload some are shed for others."""
        start = max(now, free_at) if free_at < NEVER else now  # nothing is known of what runs
        allowed = self.policy.allowed

        def seconds(rows: int) -> float:
            return self.curve.high(bucket, padded_rows(rows, allowed))

        dated = [one.deadline for one in requests if one.deadline is not None]
        if not dated or start + seconds(sum([one.rows for one in requests])) <= min(dated):
            return requests, None, []
        self._return(lane, requests, now)
        least = self.curve.predict(bucket, padded_rows(1, allowed))
        urgent = max(one.priority for one in requests)
        waiting = [
            one
            for one in (lane if bucket == lane.bucket else requests)
            if one.priority <= urgent and (start <= now or one.deadline is None or one.deadline >= start + least)
        ]  # whoever is too late behind what runs now has a chance if that ends early, and expires in time if not
        if not waiting:
            return [], None, []
        choice = overload.choose(waiting, start, self._bounds(bucket), seconds)
        gone = set(map(id, [*choice.members, *choice.shed]))
        for one in self._lanes.values():
            one.remove(gone)
        self._shed += choice.shed
        return choice.members, Reason.DEADLINE, choice.shed

    def _sized(
        self, lane: Lane, requests: list[Request], bucket: int, now: float, busy: bool
    ) -> tuple[list[Request], Reason | None]:
        """Give back what would pad a batch to an allowed size more than it is worth."""
        policy = self.policy
        if not policy.allowed:
            return requests, None
        rows = sum([request.rows for request in requests])
        wanted = rows_to_run(rows, policy.allowed, policy.padding, self.curve, bucket, busy=busy)
        kept, fits = 0, 0
        for request in requests:
            if kept and fits + request.rows > wanted:
                break
            kept, fits = kept + 1, fits + request.rows
        if kept == len(requests):
            return requests, None
        self._return(lane, sorted(requests[kept:], key=lambda request: request.arrived), now)
        return requests[:kept], Reason.ALLOWED_SIZE

    def _return(self, lane: Lane, surplus: list[Request], now: float) -> None:
        """Put requests back into the lanes that they came from."""
        if not self._axes:
            lane.put_back(surplus, self._turn(lane, now))
            return
        for request in reversed(surplus):
            _, dims = bucket_of(request, self._axes, self.policy.buckets)
            home = self._lanes[(request.lane, dims)]
            home.put_back([request], self._turn(home, now))
