"""What the corridor tells the outside: it turns the loop's doings into metrics, health and log lines.

Everything here costs per batch or per second, never per record, except one loop over a batch's waiting times.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import NamedTuple

from forebay.batching.batcher import Batcher
from forebay.custody import Custody
from forebay.health import Health
from forebay.inference.replicas import Finished
from forebay.logs import logger
from forebay.metrics import Metrics
from forebay.records import Batch, Outcome, Partition
from forebay.rooms import Rooms
from forebay.stream.outbox import Outgoing

_GAUGES_EVERY = 0.5
_SAME_EVENT_EVERY = 10.0
_UNASSIGNED_AFTER = 10.0
_COLLECT_EVERY = 60.0
_log = logger("worker")


class End(NamedTuple):
    """A partition that was read to its end: the offset behind everything in it, markers included."""

    partition: Partition
    offset: int


class Observer:
    """Watches one worker's loop; called on its thread."""

    def __init__(self, metrics: Metrics, health: Health, rooms: Rooms, custody: Custody) -> None:
        self._metrics = metrics
        self._health = health
        self._consumer = rooms.consumer
        self._pool = rooms.pool
        self._custody = custody
        self._gauges_at = 0.0
        self._now = 0.0
        self._told: dict[str, float] = {}
        self._failed: dict[str, int] = {}
        self._collected_at = 0.0
        self._joining_since: float | None = None

    def turn(self, now: float, batchers: Iterable[Batcher], outbox: Outgoing) -> None:
        """Note that the loop came round; refresh the gauges now and then."""
        self._now = now
        self._health.beat(now)
        if now - self._gauges_at >= _GAUGES_EVERY:
            self._gauges_at = now
            self._joined_by_now(now)
            self._tell_failed(now)
            if not gc.isenabled() and now - self._collected_at >= _COLLECT_EVERY:
                self._collected_at = now
                gc.collect()
            self._refresh(sum(batcher.requests for batcher in batchers), outbox)

    def _tell_failed(self, now: float) -> None:
        """Log now and then how many requests ended in an error since the last time, by code; never each of them."""
        if self._failed and now - self._told.get("requests_failed", -_SAME_EVENT_EVERY) >= _SAME_EVENT_EVERY:
            self._told["requests_failed"] = now
            _log.warning("requests_failed", **self._failed)
            self._failed.clear()

    def _joined_by_now(self, now: float) -> None:
        """Call a member without partitions ready after a while: with the consumer protocol nothing tells it so."""
        if self._health.phase == "joining the group":
            self._joining_since = self._joining_since or now
            if now - self._joining_since > _UNASSIGNED_AFTER and "kafka" not in self._health.troubles:
                self._health.phase = "serving"

    def serving(self) -> None:
        """Note that the group is being joined."""
        for name in self._pool.signatures:
            self._health.models[name] = True
        _log.info("serving", models=[f"{s.model}:{s.version}" for s in self._pool.signatures.values()])

    def notices(self) -> None:
        """Log what happened to replicas."""
        pool = self._pool
        while pool.notices:
            notice = pool.notices.popleft()
            if notice.event == "replica_lost":
                self._metrics.replica_restarts.inc()
                _log.warning(notice.event, model=notice.model, **notice.fields)
            else:
                _log.info(notice.event, model=notice.model, **notice.fields)
            if notice.model in self._health.models:
                self._health.models[notice.model] = pool.ready_count(notice.model) > 0

    def events(self) -> list[End]:
        """Take in what the client reported beside records; return the partitions that were read to their end.

        The same event is logged once in a while.
        """
        ends: list[End] = []
        while self._consumer.events:
            event = self._consumer.events.popleft()
            if event.is_end:
                if event.partition is not None and event.offset is not None:
                    ends.append(End(event.partition, event.offset))
                continue
            self._metrics.events.labels(event.name).inc()
            self._health.trouble("kafka", f"{event.name}: {event.message}")
            if self._now - self._told.get(event.name, -_SAME_EVENT_EVERY) >= _SAME_EVENT_EVERY:
                self._told[event.name] = self._now
                where = f"{event.partition.topic}/{event.partition.partition}" if event.partition else None
                _log.warning("kafka_event", name=event.name, message=event.message, partition=where)
        return ends

    def cut(self, batch: Batch, now: float) -> None:
        """Count a batch that is on its way to a replica."""
        metrics = self._metrics
        metrics.cuts.labels(batch.model, batch.reason.value).inc()
        metrics.batch_size.labels(batch.model).observe(batch.rows)
        metrics.queue_duration.observe(batch.model, [now - request.arrived for request in batch.requests])

    def finished(self, finished: Finished, encode_seconds: float) -> None:
        """Count a batch that came back."""
        metrics, timings, model = self._metrics, finished.timings, finished.batch.model
        if not timings.total:
            return
        metrics.executions.labels(model).inc(timings.executions)
        metrics.rows.labels(model).inc(finished.batch.rows)
        if timings.executions > 1:
            metrics.isolation.labels(model).inc(timings.executions - 1)
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
                code = outcome.failure.code.value
                self._failed[code] = self._failed.get(code, 0) + 1
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

    def _refresh(self, waiting: int, outbox: Outgoing) -> None:
        metrics = self._metrics
        metrics.queue_requests.set(waiting)
        metrics.queue_bytes.set(self._custody.bytes)
        metrics.in_flight.set(self._pool.in_flight)
        metrics.unacknowledged.set(outbox.unacknowledged)
        metrics.paused.set(self._consumer.paused)
        metrics.replicas_ready.set(self._pool.ready_count())
        for code in outbox.dead_letters:
            metrics.dead_letters.labels(code).inc()
        outbox.dead_letters.clear()
        for name, memory in self._pool.memory().items():
            for kind, size in memory.items():
                metrics.replica_memory.labels(name, kind).set(size)
        for partition, ledger in self._custody.offsets:
            end, mark = self._consumer.end_offset(partition), ledger.watermark
            if end is not None and mark is not None:
                metrics.lag.labels(partition.topic, str(partition.partition)).set(max(end - mark, 0))
