"""Puts a pool together from the settings. Imports no torch: devices are named here and found in the replicas."""

from __future__ import annotations

import select
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from forebay.breaker import Breakers
from forebay.inference.cores import share
from forebay.inference.inline import InlineTransport
from forebay.inference.messages import Start
from forebay.inference.pool import Limits, Pool
from forebay.inference.preparers import Preparers
from forebay.inference.replicas import Replica
from forebay.inference.staging import MARGIN, SlotSize, Staging
from forebay.inference.transports import ProcessTransport, ThreadTransport, Transport
from forebay.settings import Batch, Delivery, Inference, ModelSettings

SLOTS = 2
"""Slots of a replica: one that it runs and one that is filled meanwhile."""

_LEAST_OUTPUT = 67_108_864


def build_pool(
    models: Sequence[ModelSettings],
    sections: tuple[Inference, Batch, Delivery],
    search: Sequence[Path],
    numbers: Iterator[int],
) -> Pool:
    """Return a pool with the replicas of every model, not started. `search` are folders to import factories from."""
    inference, batch, delivery = sections
    replicas = [one for model in models for one in replicas_of(model, len(models), (inference, batch), search)]
    pool = Pool(replicas, limits_of(inference, delivery), numbers)
    pool.shares = {model.name: model.share for model in models}
    return pool


def replicas_of(
    model: ModelSettings,
    models: int,
    sections: tuple[Inference, Batch],
    search: Sequence[Path],
    generation: int = 0,
) -> list[Replica]:
    """Return the replicas of one of several models, not started; `generation` counts its reloads."""
    inference, batch = sections
    size = SlotSize(batch.max_batch_bytes + MARGIN, max(batch.max_batch_bytes, _LEAST_OUTPUT))
    start = start_of(model, inference, batch, search, size)
    start.generation = generation
    start.cpu_threads = share(1 if inference.executor == "inline" else inference.replicas * models)
    if inference.memory_fraction is not None and inference.executor == "process":
        start.memory_fraction = inference.memory_fraction / (inference.replicas * models)
    replicas = []
    for number in range(inference.replicas):
        staging = Staging(size, SLOTS)
        replicas.append(Replica(f"{model.name}-{number}", start, _transport(inference, staging), staging))
    return replicas


def build_preparers(
    models: Sequence[ModelSettings],
    sections: tuple[Inference, Batch, Delivery],
    search: Sequence[Path],
    numbers: Iterator[int],
    poller: select.poll,
) -> Preparers:
    """Return the preparers of every model, not started; none unless `inference.prepare_workers` asks for them.

    They are processes whatever the executor is. `poller` is that of the replicas, so that either wakes the loop.
    """
    inference, batch, delivery = sections
    made = [one for model in models for one in preparers_of(model, (inference, batch), search)]
    limits = replace(limits_of(inference, delivery), canary_interval=0.0)
    pool = Pool(made, limits, numbers, kind="preparer", poller=poller)
    return Preparers(pool, batch.priority_aging_ms / 1000, numbers, Breakers(delivery.breaker))


def preparers_of(model: ModelSettings, sections: tuple[Inference, Batch], search: Sequence[Path]) -> list[Replica]:
    """Return the preparers of one model, not started."""
    inference, batch = sections
    size = SlotSize(batch.max_batch_bytes + MARGIN, batch.max_batch_bytes + MARGIN)
    start = start_of(model, inference, batch, search, size)
    made = []
    for number in range(inference.prepare_workers):
        staging = Staging(size, SLOTS)
        transport = ProcessTransport(staging.descriptor, "preparer", spawned=_spawns(inference))
        made.append(Replica(f"{model.name}-{number}", start, transport, staging))
    return made


def limits_of(inference: Inference, delivery: Delivery) -> Limits:
    """Return what a pool tolerates."""
    return Limits(
        execution_timeout=inference.execution_timeout_ms / 1000,
        start_timeout=inference.start_timeout_ms / 1000,
        max_attempts=delivery.max_attempts,
        max_restarts=inference.max_restarts,
        canary_interval=0.0 if inference.executor == "inline" else inference.canary_interval_ms / 1000,
    )


def start_of(model: ModelSettings, inference: Inference, batch: Batch, search: Sequence[Path], size: SlotSize) -> Start:
    """Return what a replica of a model is told at its start."""
    return Start(
        model=model.name,
        version=model.version,
        factory=model.factory,
        path=str(model.path) if model.path else None,
        weights=str(model.weights) if model.weights else None,
        options=dict(model.options),
        device=inference.device,
        precision=inference.precision,
        threads=inference.threads,
        max_batch_size=batch.max_batch_size,
        slot_bytes=size.total,
        input_bytes=size.inputs,
        slots=SLOTS,
        search=[str(folder.resolve()) for folder in search],
        takes_prepared=inference.prepare_workers > 0,
        compile=inference.compile,
        sizes=list(batch.allowed_batch_sizes),
        buckets=list(batch.shape_buckets),
        memory_fraction=inference.memory_fraction,
        self_check=inference.self_check,
        sharing=inference.replicas if inference.executor == "thread" else 1,
        max_cost=batch.max_batch_cost,
        cost_unit=batch.cost,
        max_deviation=inference.max_deviation,
        cache_dir=str(inference.cache_dir.resolve()) if inference.cache_dir else None,
        continuous=batch.dispatch != "static",
        max_steps=inference.max_steps,
        session=uuid.uuid4().hex if inference.precision == "auto" else "",
    )


def _transport(inference: Inference, staging: Staging) -> Transport:
    if inference.executor == "process":
        return ProcessTransport(staging.descriptor, spawned=_spawns(inference))
    return ThreadTransport(staging.map) if inference.executor == "thread" else InlineTransport(staging.map)


def _spawns(inference: Inference) -> bool:
    return inference.start_method == "spawn"
