"""The corridor: receive → dispatch → collect → settle. One file tells the whole story of a request.

One thread runs all of it and owns consumer, outbox, batcher, pool and offsets; it never runs a model and never waits
for one. A failure is a value that travels the same corridor. The rooms do not know each other; only this file does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from forebay.batching.batcher import Batcher
from forebay.custody import Custody
from forebay.errors import EXIT_INTERNAL
from forebay.health import Health
from forebay.inference.replicas import Finished
from forebay.logs import logger
from forebay.metrics import Metrics
from forebay.observe import Observer
from forebay.records import Code, Failure, Outcome, Partition, Record, Request, Signature
from forebay.rooms import Rooms
from forebay.settings import Settings
from forebay.stream.codec import Decoder, Refusal
from forebay.stream.finish import Finish
from forebay.stream.intake import Intake
from forebay.stream.results import Encoder
from forebay.watchdog import leave_within

IDLE_WAIT = 0.1
"""Seconds that an idle loop waits for a record; the only wait that a lone request never sees."""

BUSY_WAIT = 0.001
"""Seconds that the loop waits for a replica before it looks at Kafka again."""

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
        self._rooms = rooms
        self._health = health
        self._clock = clock
        self._custody = Custody(settings.delivery.order_of_results)
        self._offsets = self._custody.offsets
        self._intake = Intake(rooms.consumer, settings.batch.queue_size)
        self._observer = Observer(metrics, health, rooms, self._custody)
        self._batchers: dict[str, Batcher] = {}
        self._finish: Finish | None = None
        self._stopping = self._left = False

    def stop(self) -> None:
        """Ask the loop to drain; only sets a flag."""
        self._stopping = True

    def run(self, until: Mapping[Partition, int] | None = None) -> None:
        """Warm up, join the group, serve until `stop`, then drain.

        `until` maps partitions to end offsets: the worker also ends when the group has committed all of them.
        """
        finish = self._finish = None if until is None else Finish(self._consumer, until, self._offsets)
        try:
            if self._warm_up():
                self._join()
                while not self._stopping and not (finish and finish.reached(self._clock())):
                    self._turn()
                self._drain()
        finally:
            self._leave()

    def _warm_up(self) -> bool:
        """Bring every replica up before the group is joined; a failure stops the start."""
        self._pool.launch(self._clock())
        while not self._pool.ready and not self._stopping:
            now = self._clock()
            self._pool.collect(now, IDLE_WAIT)
            self._observer.notices()
            self._health.beat(now)
        return not self._stopping

    def _join(self) -> None:
        served = [self._pool.signatures[model.name] for model in self._settings.served]
        self._start_rooms(served)
        self._consumer.start(self)
        self._health.phase = "joining the group"
        self._observer.serving()

    def _start_rooms(self, served: list[Signature]) -> None:
        kafka = self._settings.kafka
        self._decoder = Decoder(served, self._settings.limits, kafka.reply_topics)
        self._encoder = Encoder(served, kafka.output_topic, kafka.group_id)
        self._outbox = self._rooms.make_outbox(self._encoder)
        self._batchers = {signature.model: self._rooms.make_batcher(signature.model) for signature in served}
        self._ragged = {s.model: any(spec.pad is not None for spec in s.inputs) and not s.prepares for s in served}
        self._committer = self._rooms.make_committer(self._outbox, self._offsets)
        self._outbox.start()

    def _turn(self) -> None:
        now = self._clock()
        received = self._receive(now)
        now = self._clock()
        self._dispatch(now, draining=self._finish is not None and self._finish.has_read())
        self._collect(now, BUSY_WAIT if self._pool.in_flight and not received else 0.0)
        self._settle(self._clock())
        self._observer.turn(now, self._batchers.values(), self._outbox)

    def _receive(self, now: float) -> int:
        """Read what there is room for; keep polling when there is none. Returns the number of records."""
        room = self._room()
        fitting = self._custody.fitting(self._settings.batch.max_queue_bytes)
        records = self._intake.receive(room, fitting, self._wait(now) if room > 0 else 0.0, now)
        if records:
            self._accept(records)
        for event in self._observer.events():
            self._offsets.passed(event.partition, event.offset)  # only after the records before it were opened
        return len(records)

    def _room(self) -> int:
        """Return how many requests may be read; bytes count until the outcome is acknowledged."""
        batch = self._settings.batch
        if self._custody.bytes >= batch.max_queue_bytes:
            return 0
        waiting = sum(batcher.requests for batcher in self._batchers.values()) + self._pool.in_flight
        if self._outbox.unacknowledged > max(2 * batch.queue_size, _UNACKNOWLEDGED):
            return 0
        return batch.queue_size - waiting

    def _wait(self, now: float) -> float:
        """Return how long the loop may sleep in the consumer: not at all while a replica may answer."""
        if self._pool.in_flight:
            return 0.0
        wait = 0.005 if self._outbox.unacknowledged or self._consumer.commits_in_flight else IDLE_WAIT
        for batcher in self._batchers.values():
            due = batcher.next_due()
            if due is not None:
                wait = min(wait, max(due - now, 0.0))
        return wait

    def _accept(self, records: list[Record]) -> None:
        """Decode records into waiting requests; a record that is no request has its error result at once."""
        now, now_ms = self._clock(), time.time() * 1000
        take, decode, batchers, ragged = self._custody.take, self._decoder.decode, self._batchers, self._ragged
        limit = self._settings.batch.max_batch_bytes
        for record in records:
            if not take(record):
                continue
            request = decode(record, now, now_ms)
            if type(request) is Request:
                if request.item_bytes <= limit:
                    batchers[request.model].add(request, ragged=ragged[request.model])
                    continue
                message = f"the request's tensors have {request.item_bytes} bytes, batch.max_batch_bytes is {limit}"
                self._send(self._encoder.error(request, Failure(Code.TOO_LARGE, message)), now)
            elif isinstance(request, Refusal):
                self._send(self._encoder.error(request, request.failure), now)

    def _dispatch(self, now: float, draining: bool = False) -> None:
        """Cut batches while replicas have room; answer what has expired."""
        for model, batcher in self._batchers.items():
            for request in batcher.expire(now):
                late = Failure(Code.DEADLINE_EXCEEDED, "the deadline passed before the request ran")
                self._send(self._encoder.error(request, late), now)
            while batcher.requests and self._pool.has_room(model):
                batch = batcher.cut(now, idle=self._pool.is_idle(model), draining=draining)
                if batch is None:
                    break
                self._pool.submit(batch, now)
                self._observer.cut(batch, now)

    def _collect(self, now: float, wait: float) -> None:
        """Take finished batches from the replicas and send their outcomes."""
        for finished in self._pool.collect(now, wait):
            self._deliver(finished)
        self._observer.notices()

    def _deliver(self, finished: Finished) -> None:
        began = now = self._clock()
        rows = finished.batch.rows
        for requests, outputs in finished.results:
            for leaving in self._custody.release_all(self._encoder.results(requests, outputs, rows)):
                self._outbox.send(leaving, now)
        for request, failure in finished.failures:
            self._send(self._encoder.error(request, failure, rows), now)
        self._observer.finished(finished, self._clock() - began)

    def _send(self, outcome: Outcome, now: float) -> None:
        """Send an outcome when its turn has come, unless its partition belongs to somebody else by now."""
        for leaving in self._custody.release(outcome):
            self._outbox.send(leaving, now)

    def _settle(self, now: float) -> None:
        """Close acknowledged positions and commit the low watermarks."""
        self._close_acknowledged(now)
        self._health.trouble("delivery", self._outbox.trouble)
        for marks, failed in self._committer.settle(now, idle=not self._custody.requests):
            self._observer.committed(marks, failed)

    def _close_acknowledged(self, now: float) -> None:
        closed = self._outbox.serve(now)
        if closed:
            self._custody.close(closed)
            self._observer.closed(closed, now)
        if self._outbox.must_rewind:
            self._rewind()

    def _rewind(self) -> None:
        """Read again from the committed offsets: nobody knows what became of the last transaction."""
        self._outbox.must_rewind = False
        partitions = [partition for partition, _ in self._offsets]
        self._give_up(set(partitions))
        self._offsets.assigned(partitions)
        self._consumer.rewind(partitions)
        self._observer.rebalanced("rewound", partitions)

    def assigned(self, partitions: list[Partition]) -> None:
        """Open the ledgers of new partitions; a member that gets none is as ready as the others."""
        if not self._stopping:
            self._health.phase = "serving"
        self._offsets.assigned(partitions)
        self._observer.rebalanced("assigned", partitions)

    def revoked(self, partitions: list[Partition]) -> None:
        """Finish what was begun for the partitions within the budget, settle it, give the rest back."""
        given = set(partitions)
        self._abandon(given, keep_overtaken=not self._left)
        delivery = self._settings.delivery
        deadline = self._clock() + min(delivery.revoke_timeout_ms, delivery.drain_timeout_ms) / 1000
        while not self._left and self._custody.is_busy_with(given) and (now := self._clock()) < deadline:
            self._dispatch(now, draining=True)
            self._collect(now, 0.005)
            self._close_acknowledged(self._clock())
            self._health.beat(now)
        self._abandon(given)
        if not self._left:
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

    def _abandon(self, partitions: set[Partition], *, keep_overtaken: bool = False) -> None:
        gone = self._custody.abandon(partitions, self._batchers.values(), self._pool, keep_overtaken=keep_overtaken)
        self._observer.dropped("revoked", gone)

    def _drain(self) -> None:
        """Finish what was read, commit it and leave the group, within the drain budget."""
        self._health.phase = "draining"
        began = self._clock()
        deadline = began + self._settings.delivery.drain_timeout_ms / 1000
        _log.info("draining", waiting=self._custody.requests)
        while self._custody.requests and (now := self._clock()) < deadline:
            self._poll_while_draining()
            self._dispatch(now, draining=True)
            self._collect(now, BUSY_WAIT)
            self._settle(self._clock())
            self._observer.turn(now, self._batchers.values(), self._outbox)
        while self._clock() < deadline and not self._committer.is_settled:
            self._poll_while_draining()
            self._settle(self._clock())
            time.sleep(0.001)
        if self._custody.requests:
            _log.warning("drain_timeout", given_back=self._custody.requests)
        _log.info("drained", seconds=round(self._clock() - began, 3))

    def _poll_while_draining(self) -> None:
        """Serve the consumer's callbacks. Records that still come are not opened, and no position passes over them."""
        self._consumer.receive(1, 0.0)
        self._observer.events()

    def _leave(self) -> None:
        """Leave the group and end the replicas; nothing is committed any more."""
        self._health.phase = "stopped"
        self._left = True
        with leave_within(_LEAVE_SECONDS, EXIT_INTERNAL if self._custody.requests else 0):
            self._consumer.close()
            if self._batchers:
                self._outbox.close()
            self._pool.stop()
