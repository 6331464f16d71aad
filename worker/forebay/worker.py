"""The corridor: receive → dispatch → collect → settle. One file tells the whole story of a request.

One thread runs all of it and owns consumer, outbox, batcher, pool and offsets; it never runs a model and never waits
for one. A failure is a value that travels the same corridor. The rooms do not know each other; only this file does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from forebay import failpoints
from forebay.batching.batcher import Batcher
from forebay.breaker import Breakers
from forebay.custody import Custody, Queue
from forebay.dispatch import Dispatch
from forebay.errors import EXIT_INTERNAL, DeviceLostError, ModelBrokenError, NoStartError
from forebay.handing_on import hand_on, settle_until
from forebay.health import Health
from forebay.inference.matching import Finished
from forebay.logs import logger
from forebay.metrics import Metrics
from forebay.observe import Observer
from forebay.pace import BUSY_WAIT, IDLE_WAIT, Pace
from forebay.reception import Reception
from forebay.records import Failure, Outcome, Partition, Request, Signature
from forebay.reloading import Reloading
from forebay.rooms import Rooms
from forebay.settings import Settings
from forebay.stream.codec import Refusal
from forebay.stream.finish import Finish
from forebay.stream.intake import Intake
from forebay.stream.results import Encoder
from forebay.suspicion import Suspicion
from forebay.watchdog import leave_within

_LEAVE_SECONDS = 15.0
_UNACKNOWLEDGED = 4096
_log = logger("worker")


class Worker:
    """One group member. `run` returns when it has drained; `stop` may be called from a signal handler."""

    def __init__(
        self,
        settings: Settings,
        rooms: Rooms,
        metrics: Metrics,
        health: Health,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._consumer = rooms.consumer
        self._pool = rooms.pool
        self._preparers = rooms.preparers
        self._rooms = rooms
        self._health = health
        self._clock = clock
        self._custody = Custody(settings.delivery, rooms.consumer, rooms.offsets)
        self._offsets = self._custody.offsets
        self._intake = Intake(rooms.consumer, settings.batch.queue_size)
        self._observer = Observer(metrics, health, rooms, self._custody)
        self._batchers: dict[str, Batcher] = {}
        self._breakers = Breakers(settings.delivery.breaker, rooms.preparers.breakers)
        self.reloading = Reloading(settings, rooms, metrics)
        self._finish: Finish | None = None
        self._stopping = self._left = False

    def stop(self) -> None:
        """Ask the loop to drain; only sets a flag."""
        self._stopping = True

    def run(self, until: Mapping[Partition, int] | None = None) -> None:
        """Warm up, join the group, serve until `stop`, then drain.

        `until` maps partitions to end offsets: the worker also ends when the group has committed all of them.
        """
        finish = self._finish = None if until is None else Finish(self._consumer, until, self._offsets, self._breakers)
        try:
            if self._warm_up():
                self._join()
                while not self._stopping and not (finish and finish.reached(self._clock())):
                    self._turn()
                self._drain()
        except NoStartError:
            self._drain()
            raise
        except (DeviceLostError, ModelBrokenError):
            if self._batchers:
                hand_on(self._committer, self._outbox, self._clock, self._poll_while_draining, self._settle)
            raise
        finally:
            self._leave()

    def _warm_up(self) -> bool:
        """Bring every replica and preparer up before the group is joined; a failure stops the start."""
        self._rooms.launch(self._clock())
        while not self._rooms.ready and not self._stopping:
            now = self._clock()
            self._rooms.collect(now, IDLE_WAIT)
            self._observer.notices()
            self._health.beat(now)
        return not self._stopping

    def _join(self) -> None:
        self._start_rooms([self._pool.signatures[model.name] for model in self._settings.served])
        self._consumer.start(self)
        self._health.phase = "joining the group"
        self._observer.serving()

    def _start_rooms(self, served: list[Signature]) -> None:
        kafka = self._settings.kafka
        self._encoder = Encoder(served, kafka.output_topic, kafka.group_id)
        self._outbox = self._rooms.make_outbox(self._encoder)
        self._batchers = {signature.model: self._rooms.make_batcher(signature) for signature in served}
        rooms = (self._preparers, self._custody, self._batchers)
        self._reception = Reception(served, self._settings, *rooms, self._refuse)
        more = partial(self._intake.more_to_come, self._offsets) if self._settings.batch.minds_backlog else None
        self._dispatcher = Dispatch(self._batchers, self._pool, self._observer, self._breakers, more)
        self._pace = Pace(self._rooms, self._outbox, self._dispatcher, self._breakers)
        self._committer = self._rooms.make_committer(self._outbox, self._offsets)
        self._suspicion = Suspicion(self._offsets, self._pool, self._preparers)
        self.reloading.serve(self._encoder, self._reception, self._dispatcher, self._breakers)
        self._outbox.start()

    def _turn(self) -> None:
        received = self._receive(self._clock())
        now = self._clock()
        self._dispatch(now, draining=self._finish is not None and self._finish.has_read())
        self._collect(now, 0.0 if received else self._pace.for_replica(now))
        self._settle(self._clock())
        self._observer.turn(now, self._batchers.values(), self._outbox)

    def _receive(self, now: float) -> int:
        """Read what there is room for; keep polling when there is none. Returns the number of records."""
        room = self._room()
        fitting = self._custody.fitting(self._settings.batch.max_queue_bytes)
        records = self._intake.receive(room, fitting, self._pace.for_record(now) if room > 0 else 0.0, now)
        if records:
            self._reception.accept(records, self._clock())
        for event in self._observer.events():
            self._offsets.passed(event.partition, event.offset)  # only after the records before it were opened
        return len(records)

    def _room(self) -> int:
        """Return how many requests may be read; bytes count until the outcome is acknowledged."""
        batch = self._settings.batch
        held = self._custody.bytes + (self._reception.prepared_bytes if self._pool.in_flight else 0)
        if held >= batch.max_queue_bytes or self._outbox.unacknowledged > max(2 * batch.queue_size, _UNACKNOWLEDGED):
            return 0
        waiting = self._dispatcher.waiting + self._custody.waiting
        return batch.queue_size - waiting - self._preparers.requests - self._pool.in_flight

    def _dispatch(self, now: float, draining: bool = False) -> None:
        """Take in what is prepared; cut batches while replicas have room; answer what has expired."""
        self.reloading.turn(now, stopping=self._stopping)
        self._observer.prepared(self._reception.advance(now, busy=self._pool.in_flight > 0))
        self._suspicion.isolate(self._batchers.values(), now)
        for request, failure in self._dispatcher.expired(now):
            self._refuse(request, failure)
        self._dispatcher.submit(now, draining=draining)

    def _collect(self, now: float, wait: float) -> None:
        """Take finished batches from the replicas, which go on with the next, and send their outcomes."""
        for finished in self._dispatcher.came_back(self._pool.collect(now, wait), self._custody, self._clock()):
            self._deliver(finished)
        self._observer.notices()

    def _deliver(self, finished: Finished) -> None:
        failpoints.hit("before_produce")
        began = now = self._clock()
        rows, ran = finished.rows, finished.signature
        for requests, outputs in finished.results:
            for leaving in self._custody.release_all(self._encoder.results(requests, outputs, rows, ran)):
                self._outbox.send(leaving, now)
        for request, failure in finished.failures:
            self._send(self._encoder.error(request, failure, rows, ran), now)
        failpoints.hit("after_produce")
        self._observer.finished(finished, self._clock() - began)

    def _refuse(self, request: Request | Refusal, failure: Failure) -> None:
        if self._rooms.tracing is not None:
            self._rooms.tracing.refused(request, failure, self._clock())
        self._send(self._encoder.error(request, failure), self._clock())

    def _send(self, outcome: Outcome, now: float) -> None:
        """Send an outcome when its turn has come, unless its partition belongs to somebody else by now."""
        for leaving in self._custody.release(outcome):
            self._outbox.send(leaving, now)

    def _settle(self, now: float) -> None:
        """Close acknowledged positions and commit the low watermarks."""
        self._close_acknowledged(now)
        self._health.trouble("delivery", self._outbox.trouble)
        self._suspicion.note()
        for marks, failed in self._committer.settle(now, idle=not self._custody.requests):
            self._observer.committed(marks, failed)

    def _close_acknowledged(self, now: float) -> None:
        if closed := self._outbox.serve(now):
            self._custody.close(closed)
            self._reception.answered(closed)
            self._observer.closed(closed, now)
        for leaving in self._custody.take_freed():
            self._outbox.send(leaving, now)
        if self._outbox.must_rewind:
            self._rewind()

    def _rewind(self) -> None:
        """Read again from the committed offsets: nobody knows what became of the last transaction."""
        partitions = [partition for partition, _ in self._offsets]
        if not self._consumer.rewind(partitions):
            return  # the coordinator does not answer: the next turn asks again, and nothing is sent until then
        self._outbox.must_rewind = False
        self._give_up(set(partitions))
        self._custody.assigned(partitions)
        self._observer.rebalanced("rewound", partitions)

    def assigned(self, partitions: list[Partition]) -> None:
        """Open the ledgers of new partitions; a member that gets none is as ready as the others."""
        if not self._stopping:
            self._health.phase = "serving"
        self._custody.assigned(partitions)
        self._committer.recall(partitions)
        self._observer.rebalanced("assigned", partitions)

    def revoked(self, partitions: list[Partition]) -> None:
        """Finish what was begun for the partitions within the budget, settle it, give the rest back."""
        given = set(partitions)
        self._abandon(given, not (self._left or self._breakers or self._preparers.breakers), last=False)
        delivery = self._settings.delivery
        deadline = self._clock() + min(delivery.revoke_timeout_ms, delivery.drain_timeout_ms) / 1000
        while not self._left and self._custody.is_busy_with(given) and (now := self._clock()) < deadline:
            self._dispatch(now, draining=True)
            self._collect(now, 0.005)
            self._close_acknowledged(self._clock())
            self._health.beat(now)
        self._abandon(given)
        if not self._left:
            self._suspicion.note()
            self._committer.leave(given)
        self._custody.forget(given, self._outbox)
        self._observer.rebalanced("revoked", partitions)

    def lost(self, partitions: list[Partition]) -> None:
        """Forget partitions that were taken away; nothing of them may be committed."""
        self._give_up(set(partitions))
        self._observer.rebalanced("lost", partitions)

    def _give_up(self, partitions: set[Partition]) -> None:
        self._abandon(partitions)
        self._custody.forget(partitions, self._outbox)

    def _abandon(self, partitions: set[Partition], keep_overtaken: bool = False, *, last: bool = True) -> None:
        queues: list[Queue] = [*self._batchers.values(), self._preparers]
        gone = self._custody.abandon(partitions, queues, self._pool, keep_overtaken=keep_overtaken, last=last)
        self._observer.dropped("revoked", gone)

    def _drain(self) -> None:
        """Finish what was read, commit it and leave the group, within the drain budget."""
        self._health.phase = "draining"
        began = self._clock()
        deadline = began + self._settings.delivery.drain_timeout_ms / 1000
        _log.info("draining", waiting=self._custody.requests)
        while self._clock() < deadline and self._custody.unanswered > self._dispatcher.stuck + self._preparers.stuck:
            self._poll_while_draining()
            now = self._clock()
            self._dispatch(now, draining=True)
            self._collect(now, BUSY_WAIT)
            self._settle(self._clock())
            self._observer.turn(now, self._batchers.values(), self._outbox)
        settle_until(deadline, lambda: self._committer.is_settled, self._clock, self._poll_while_draining, self._settle)
        if left := self._custody.requests:
            given = {partition for partition, _ in self._offsets}
            self._committer.leave(given)  # with what is finished ahead
            if self._outbox.unacknowledged:
                self._custody.forget(given, self._outbox)  # when the transaction that is under way has ended
                self._close_acknowledged(self._clock())
            _log.warning("drain_timeout", given_back=left)
        _log.info("drained", seconds=round(self._clock() - began, 3))

    def _poll_while_draining(self) -> None:
        """Serve the consumer's callbacks. Records that still come are not opened, and no position passes over them."""
        failpoints.hit("during_drain")
        self._consumer.receive(1, 0.0)
        self._observer.events()

    def _leave(self) -> None:
        """Leave the group and end the replicas; nothing is committed any more."""
        self._health.phase = "stopped"
        self._observer.left()
        self._left = True
        with leave_within(_LEAVE_SECONDS, EXIT_INTERNAL if self._custody.requests else 0):
            self._consumer.close()
            if self._batchers:
                self._outbox.close()
            self._preparers.pool.stop(at_once=True)
            self._pool.stop()
