"""Puts the rooms of a worker together from its settings; nothing is started. Kafka's side can be a double."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from forebay.batching.batcher import Batcher
from forebay.batching.padding import Axes
from forebay.batching.policy import Policy
from forebay.batching.sizes import Bounds
from forebay.inference.assembly import build_pool, build_preparers, preparers_of, replicas_of
from forebay.inference.pool import Pool
from forebay.inference.replicas import Replica
from forebay.records import Signature
from forebay.rooms import Rooms
from forebay.settings import Batch, ModelSettings, Settings
from forebay.stream.client_config import consumer_config, producer_config, share_config
from forebay.stream.committer import Committer, Committing
from forebay.stream.consumer import Consumer
from forebay.stream.credentials import TakesCredentials
from forebay.stream.identity import transactional_id
from forebay.stream.leases import Leases
from forebay.stream.offsets import Offsets
from forebay.stream.outbox import Outbox, Outgoing
from forebay.stream.results import Encoder
from forebay.stream.share_committer import ShareCommitter
from forebay.stream.share_consumer import Service, ShareConsumer, Sharing
from forebay.stream.starts import StartRule
from forebay.stream.throttling import Throttling
from forebay.stream.transaction_offsets import TransactionalCommitter
from forebay.stream.transactions import TransactionalOutbox

_OVERHEAD = 0.003
"""Seconds that a request spends outside the model: from Kafka to its batch and from there to the acknowledgement."""


def build_rooms(
    settings: Settings, search: Sequence[Path], limits: Mapping[str, int], sharing: Sharing | None = None
) -> Rooms:
    """Return the rooms of a real worker. `limits` maps topics to their largest message in bytes, where it is known.

    `sharing` is for queue mode.
    """
    if sharing is not None:
        return build_queue_rooms(settings, search, limits, sharing)
    kafka, delivery = settings.kafka, settings.delivery
    rule = StartRule(kafka.auto_offset_reset, kafka.offset_out_of_range)
    throttling = Throttling()
    consumer = Consumer(throttling.watch("consumer", consumer_config(kafka, settings.batch)), kafka.input_topics, rule)
    logins: list[TakesCredentials] = [consumer]
    interval = delivery.commit_interval_ms / 1000

    def make_outbox(encoder: Encoder) -> Outgoing:
        outbox: Outbox | TransactionalOutbox
        if delivery.guarantee == "at_least_once":
            config = throttling.watch("producer", producer_config(kafka, delivery))
            outbox = Outbox(config, encoder, kafka.dead_letter_topic, ordering=delivery.ordering)
        else:
            named = delivery.model_copy(
                update={"transactional_id": delivery.transactional_id or transactional_id(kafka.group_id)}
            )
            config = throttling.watch("producer", producer_config(kafka, named))
            outbox = TransactionalOutbox(config, encoder, kafka.dead_letter_topic, consumer.group_metadata)
        outbox.limits = dict(limits)
        logins.append(outbox)
        return outbox

    def make_committer(outbox: Outgoing, offsets: Offsets) -> Committing:
        if isinstance(outbox, TransactionalOutbox):
            return TransactionalCommitter(outbox, offsets, interval, consumer)
        return Committer(consumer, offsets, interval, remembers=delivery.order_of_results == "none")

    parts = {"consumer": consumer, "make_outbox": make_outbox, "make_committer": make_committer, "logins": logins}
    return assemble(settings, search, **parts, throttling=throttling)


def build_queue_rooms(settings: Settings, search: Sequence[Path], limits: Mapping[str, int], sharing: Sharing) -> Rooms:
    """Return the rooms of a worker in queue mode: another member, another ledger, acknowledgements, no commits."""
    kafka, delivery = settings.kafka, settings.delivery
    leases, throttling = Leases(delivery.max_attempts), Throttling()
    consumer = ShareConsumer(
        share_config(kafka, settings.batch),
        kafka.input_topics,
        leases,
        sharing,
        most=settings.batch.queue_size,
        service=lambda: service_of(rooms.pool),
    )
    logins: list[TakesCredentials] = [consumer]

    def make_outbox(encoder: Encoder) -> Outgoing:
        config = throttling.watch("producer", producer_config(kafka, delivery))
        outbox = Outbox(config, encoder, kafka.dead_letter_topic)
        outbox.limits = dict(limits)
        logins.append(outbox)
        return outbox

    def make_committer(outbox: Outgoing, offsets: Offsets) -> Committing:
        return ShareCommitter(consumer, delivery.commit_interval_ms / 1000)

    parts = {"consumer": consumer, "make_outbox": make_outbox, "make_committer": make_committer, "logins": logins}
    rooms = assemble(settings, search, **parts, offsets=leases, throttling=throttling)
    return rooms


def service_of(pool: Pool) -> Service | None:
    """Return how fast the replicas are by what their warm-up has measured; None where it measured nothing."""
    curves = {model: curve for model, curve in pool.curves.items() if curve}
    if not curves:
        return None
    rates = [
        max(rows / max(seconds, 1e-6) for _, rows, seconds in curve) * max(pool.ready_count(model), 1)
        for model, curve in curves.items()
    ]
    return Service(min(rates), max(seconds for curve in curves.values() for _, _, seconds in curve))


def assemble(settings: Settings, search: Sequence[Path], **kafka_side: Any) -> Rooms:
    """Return rooms around Kafka's side: `consumer`, `make_outbox` and `make_committer`."""
    numbers = count(1)
    policy = policy_of(settings.batch)
    sections = (settings.inference, settings.batch, settings.delivery)
    pool = build_pool(settings.served, sections, search, numbers)

    def make_successors(model: ModelSettings, generation: int) -> tuple[list[Replica], list[Replica]]:
        replicas = replicas_of(model, len(settings.served), sections[:2], search, generation)
        return replicas, preparers_of(model, sections[:2], search)

    return Rooms(
        pool=pool,
        preparers=build_preparers(settings.served, sections, search, numbers, pool.poller),
        make_successors=make_successors,
        make_batcher=lambda one: Batcher(one.model, joining(policy) if one.room else policy, numbers, axes_of(one)),
        **kafka_side,
    )


def policy_of(batch: Batch) -> Policy:
    """Return how batches are cut under these settings."""
    return Policy(
        Bounds(batch.max_batch_size, batch.max_batch_bytes, batch.max_batch_cost, batch.cost),
        batch.dispatch,
        batch.max_wait_ms / 1000,
        batch.priority_aging_ms / 1000,
        allowed=batch.allowed_batch_sizes,
        padding=batch.padding,
        buckets=batch.shape_buckets or None,
        target_latency=None if batch.target_latency_ms is None else batch.target_latency_ms / 1000,
        overhead=_OVERHEAD,
        backlog_only=batch.linger_for == "backlog",
    )


def joining(policy: Policy) -> Policy:
    """Return how requests leave whose rows join what runs in steps: one by one, as soon as there is room."""
    return replace(
        policy, bounds=replace(policy.bounds, rows=1, cost=None), dispatch="eager", target_latency=None, joins=True
    )


def axes_of(signature: Signature) -> Axes:
    """Return the ragged dimensions of what is batched: those that vary and may be padded."""
    return tuple(
        (index, axis)
        for index, spec in enumerate(signature.batched)
        if spec.pad is not None
        for axis, dim in enumerate(spec.shape)
        if axis and dim == -1
    )
