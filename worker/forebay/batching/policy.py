"""How batches are cut: the settings of the batching room, as plain values. Times are seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.batching.sizes import Bounds

LEAD = 0.001
"""Most seconds before the predicted end of an execution at which the next batch is bound: time to stage it."""

LEAD_SHARE = 0.04
"""Of the execution before it: members that are bound early cost latency, and small batches are staged quickly."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How batches are cut.

    `allowed` are the batch sizes (rows, increasing) that the model runs in; `buckets` the lengths that ragged
    dimensions are padded to, None for a series of buckets that only groups. `target_latency` bounds what a request
    waits and runs together, of which `overhead` is spent outside the model. `backlog_only` lets `linger` wait only
    for requests that are known to exist. `joins` is for a model whose rows join what runs: requests leave one by one.
    """

    bounds: Bounds
    dispatch: Literal["eager", "linger", "static", "defer"] = "eager"
    max_wait: float = 0.0
    priority_aging: float = 1.0
    allowed: tuple[int, ...] = ()
    padding: Literal["min_cost", "pad_up", "batch_down"] = "min_cost"
    buckets: tuple[int, ...] | None = None
    target_latency: float | None = None
    overhead: float = 0.0
    backlog_only: bool = False
    lead: float = LEAD
    lead_share: float = LEAD_SHARE
    margin: float = 0.002
    joins: bool = False
