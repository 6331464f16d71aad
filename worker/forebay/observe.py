"""What the corridor tells the outside: it turns the loop's doings into metrics, health and log lines.

Everything here costs per batch or per second, never per record, except one loop over a batch's waiting times.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable

from forebay import precisions
from forebay.batching.batcher import Batcher
from forebay.breaker import MEND, Change
from forebay.client_events import ClientEvents, End
from forebay.custody import Custody
from forebay.failures import Failures
from forebay.health import Health
from forebay.hindrances import Hindrances
from forebay.inference.gain import COMPARED
from forebay.inference.matching import Finished
from forebay.inference.pool import Notice
from forebay.inference.replicas import Replica
from forebay.logs import logger
from forebay.metrics import Metrics
from forebay.records import Batch, Outcome, Partition, Reason
from forebay.rooms import Rooms
from forebay.standstill import Standstill
from forebay.stream.duplicates import Duplicates
from forebay.stream.outbox import Outgoing

_GAUGES_EVERY = 0.5
_UNASSIGNED_AFTER = 10.0
_COLLECT_EVERY = 60.0
_log = logger("worker")


class Observer:
    """Watches one worker's loop; called on its thread."""

    def __init__(self, metrics: Metrics, health: Health, rooms: Rooms, custody: Custody) -> None:
        self._metrics = metrics
        self._health = health
        self._consumer = rooms.consumer
        self._pool = rooms.pool
        self.tracing = rooms.tracing
        self._preparers = rooms.preparers
        self._custody = custody
        self._standstill = Standstill(health, rooms.consumer)
        self._gauges_at = 0.0
        self._now = 0.0
        self._events = ClientEvents(metrics, health, rooms.consumer)
        self._failures = Failures()
        self._hindrances = Hindrances(health)
        self._throttling = rooms.throttling
        self._collected_at = 0.0
        self._curves: dict[str, int] = {}
        self._joining_since: float | None = None

    def turn(self, now: float, batchers: Iterable[Batcher], outbox: Outgoing) -> None:
        """Note that the loop came round; refresh the gauges now and then."""
        self._now = now
        self._health.beat(now)
        if now - self._gauges_at >= _GAUGES_EVERY:
            self._gauges_at = now
            self._joined_by_now(now)
            self._standstill.look(now, outbox, self._custody.closed, self._pool)
            self._failures.tell(now)
            self._events.throttled(self._throttling, now)
            self._hindrances.look(now)
            if not gc.isenabled() and now - self._collected_at >= _COLLECT_EVERY:
                self._collected_at = now
                gc.collect()
            found = list(batchers)
            self._refresh(sum(batcher.requests for batcher in found), outbox)
            for batcher in found:
                self._tell_curve(batcher)

    def _tell_curve(self, batcher: Batcher) -> None:
        """Publish the service-time curve and the caps that follow from it, where they changed."""
        metrics, model = self._metrics, batcher.model
        if self._curves.get(model) == batcher.curve.version:
            return
        self._curves[model] = batcher.curve.version
        for bucket, rows, middle, high in batcher.curve.points():
            metrics.service_time.labels(model, str(bucket), str(rows), "0.5").set(middle)
            metrics.service_time.labels(model, str(bucket), str(rows), "0.95").set(high)
        for bucket in batcher.curve.buckets:
            metrics.cap.labels(model, str(bucket)).set(batcher.caps.rows(bucket))

    def _joined_by_now(self, now: float) -> None:
        """Call a member without partitions ready after a while: with the consumer protocol nothing tells it so."""
        if self._health.phase == "joining the group":
            self._joining_since = self._joining_since or now
            if now - self._joining_since > _UNASSIGNED_AFTER and "kafka" not in self._health.troubles:
                self._health.phase = "serving"

    def left(self) -> None:
        """Note that nothing more will be answered."""
        self._failures.tell(self._now, at_once=True)

    def serving(self) -> None:
        """Note that the group is being joined."""
        for name in self._pool.signatures:
            self._health.models[name] = True
        _log.info("serving", models=[f"{s.model}:{s.version}" for s in self._pool.signatures.values()])

    def notices(self) -> None:
        """Log what happened to replicas and preparers."""
        for pool in (self._pool, self._preparers.pool):
            while pool.notices:
                self._notice(pool.notices.popleft())

    def _notice(self, notice: Notice) -> None:
        model = notice.model
        if notice.event.endswith("_lost"):
            restarts = {
                "replica_lost": self._metrics.replica_restarts,
                "preparer_lost": self._metrics.preparer_restarts,
            }
            restarts[notice.event].inc()
            _log.warning(notice.event, model=model, **notice.fields)
        elif notice.event.endswith("_checked"):
            self._metrics.canaries.labels(model, notice.fields["result"]).inc()
            if notice.fields["result"] != "ok":
                _log.warning(notice.event, model=model, **notice.fields)
        elif notice.event == COMPARED:
            self._metrics.replica_gain.labels(model).set(float(str(notice.fields["gain"])))
            (_log.warning if "mend" in notice.fields else _log.info)(COMPARED, model=model, **notice.fields)
        else:
            _log.info(notice.event, model=model, **notice.fields)
        if notice.ready is not None:
            for bucket, rows, size in notice.ready.peaks:
                self._metrics.peak.labels(model, str(bucket), str(rows)).set(size)
            if notice.ready.difference is not None:
                self._metrics.difference.labels(model).set(notice.ready.difference)
            precisions.tell(self._metrics, model, notice.ready)
        if model in self._health.models:
            self._health.models[model] = self._pool.ready_count(model) > 0
            preparing = self._preparers.pool
            stuck = model in preparing.signatures and not preparing.ready_count(model)
            self._health.trouble(f"preparers of {model}", "no preparer is ready" if stuck else None)

    def broken(self, changes: deque[Change]) -> None:
        """Tell that a model fails its own example, or works again."""
        while changes:
            change = changes.popleft()
            is_open = change.state != "closed"
            self._metrics.breaker_open.labels(change.model).set(is_open)
            told = f"model {change.model} fails its own warm-up example, too ({change.why}): {MEND}"
            self._health.trouble(f"breaker {change.model}", told if is_open else None)
            if change.state == "opened":
                self._metrics.breaker_opened.labels(change.model).inc()
                _log.error("breaker_opened", model=change.model, why=change.why, mend=MEND)
            else:
                _log.warning(f"breaker_{change.state.replace(' ', '_')}", model=change.model, tries=change.tries)

    def events(self) -> list[End]:
        """Take in what the client reported beside records; return the partitions that were read to their end."""
        return self._events.take(self._now)

    def cut(self, batch: Batch, now: float, batcher: Batcher) -> None:
        """Count a batch that is on its way to a replica."""
        metrics, waits = self._metrics, [now - request.arrived for request in batch.requests]
        metrics.batch_size.labels(batch.model).observe(batch.rows)
        metrics.queue_duration.observe(batch.model, waits)
        metrics.oldest_wait.observe(batch.model, (max(waits),))
        real, padding = batcher.padding(batch)
        if real:
            metrics.elements.labels(batch.model, "real").inc(real)
            metrics.elements.labels(batch.model, "padding").inc(padding)

    def prepared(self, seconds: dict[str, list[float]]) -> None:
        """Count what `prepare` took for requests that came back from preparers; tell where a model cannot prepare."""
        self.broken(self._preparers.breakers.changes)
        for model, took in seconds.items():
            self._metrics.prepare_duration.observe(model, took)

    def finished(self, finished: Finished, encode_seconds: float) -> None:
        """Count a batch that came back."""
        metrics, timings, model = self._metrics, finished.timings, finished.batch.model
        if not timings.total:
            return
        metrics.model_seconds.labels(model).inc(timings.total)
        metrics.rows.labels(model).inc(finished.batch.rows - sum(request.rows for request in finished.left))
        if timings.executions:
            metrics.executions.labels(model).inc(timings.executions)
            metrics.cuts.labels(model, finished.batch.reason.value).inc()
            split = max(timings.pieces - 1, 0)
            metrics.cuts.labels(model, Reason.SPLIT.value).inc(split)
            isolated = timings.executions - 1 - split
            metrics.cuts.labels(model, Reason.ISOLATION.value).inc(isolated)
            metrics.isolation.labels(model).inc(isolated)
            metrics.recompiles.labels(model).inc(timings.recompiles)
            metrics.out_of_memory.labels(model).inc(timings.refused)
        for stage, seconds in (("stage", timings.stage), ("forward", timings.forward), ("encode", encode_seconds)):
            metrics.batch_stage.labels(model, stage).observe(seconds)

    def closed(self, outcomes: list[Outcome], now: float) -> None:
        """Count outcomes whose acknowledgement came."""
        results: dict[str, list[float]] = {}
        for outcome in outcomes:
            if outcome.failure is None:
                found = results.get(outcome.model)
                if found is None:
                    found = results[outcome.model] = []
                found.append(now - outcome.arrived)
            else:
                model = outcome.model if outcome.model in self._health.models else "unknown"
                self._metrics.requests.labels(model, outcome.failure.code.value).inc()
                self._metrics.request_duration.observe(model, [now - outcome.arrived])
                self._failures.note(outcome)
        for model, durations in results.items():
            self._metrics.requests.labels(model, "ok").inc(len(durations))
            self._metrics.request_duration.observe(model, durations)

    def committed(self, marks: dict[Partition, int], failed: dict[Partition, str]) -> None:
        """Count the answer to a commit."""
        for partition, mark in marks.items():
            if partition not in failed:
                self._metrics.committed.labels(partition.topic, str(partition.partition)).set(mark)
        for name in set(failed.values()):
            self._metrics.commits.labels(name).inc()
            if self._events.is_due(f"commit {name}", self._now):
                _log.warning("commit_refused", error=name, partitions=sum(value == name for value in failed.values()))
        if not failed:
            self._metrics.commits.labels("ok").inc()
            self._health.trouble("kafka", None)

    def rebalanced(self, kind: str, partitions: list[Partition]) -> None:
        """Count and log a change of the assignment."""
        self._metrics.rebalances.labels(kind).inc()
        assigned = len(self._custody.offsets)
        self._metrics.assigned.set(assigned)
        if kind == "assigned":
            self._health.trouble("kafka", None)
        else:
            self._metrics.forget(partitions)
        _log.info(f"partitions_{kind}", partitions=[f"{p.topic}/{p.partition}" for p in partitions], assigned=assigned)

    def dropped(self, why: str, number: int) -> None:
        """Count requests that were given back unanswered."""
        if number:
            self._metrics.dropped.labels(why).inc(number)

    def _tell_duplicates(self, duplicates: Duplicates) -> None:
        self._metrics.duplicates.inc(duplicates.repeated)
        duplicates.repeated = 0
        self._metrics.remembered_ids.set(len(duplicates))
        self._metrics.forgotten_ids.inc(duplicates.take_forgotten())

    def _tell_steps(self, replica: Replica) -> None:
        metrics, model, told = self._metrics, replica.model, replica.progress.taken()
        metrics.steps.labels(model).inc(told.steps)
        metrics.step_rows.labels(model).inc(told.row_steps)
        metrics.step_seconds.labels(model).inc(told.seconds)
        metrics.restarted_rows.labels(model).inc(told.restarted)
        metrics.running_rows.labels(model, replica.name).set(told.rows)

    def _refresh(self, waiting: int, outbox: Outgoing) -> None:
        metrics = self._metrics
        metrics.queue_requests.set(waiting + self._preparers.waiting)
        metrics.queue_bytes.set(self._custody.bytes)
        metrics.in_flight.set(self._pool.in_flight + self._preparers.running)
        metrics.preparing.set(self._preparers.requests)
        metrics.unacknowledged.set(outbox.unacknowledged)
        metrics.paused.set(self._consumer.paused)
        metrics.replicas_ready.set(self._pool.ready_count())
        for code in outbox.dead_letters:
            metrics.dead_letters.labels(code).inc()
        outbox.dead_letters.clear()
        for seconds in outbox.settled_in:
            metrics.transaction_duration.observe(seconds)
        outbox.settled_in.clear()
        metrics.recalled.inc(self._custody.offsets.skipped)
        self._custody.offsets.skipped = 0
        if self._custody.lookback is not None:
            self._tell_duplicates(self._custody.lookback.duplicates)
        for replica in (one for model in self._pool.signatures for one in self._pool.of(model)):
            if replica.progress.steps or replica.progress.restarted:
                self._tell_steps(replica)
        for name, memory in self._pool.memory().items():
            for kind, size in memory.items():
                metrics.replica_memory.labels(name, kind).set(size)
        for name, memory in self._preparers.pool.memory().items():
            metrics.preparer_memory.labels(name).set(memory.get("resident", 0))
        for partition, ledger in self._custody.offsets:
            end, mark = self._consumer.end_offset(partition), ledger.watermark
            if end is not None and mark is not None:
                metrics.lag.labels(partition.topic, str(partition.partition)).set(max(end - mark, 0))
