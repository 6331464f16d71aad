"""The settings of a micro-batch's bounds, of what waits in front of it and of what one request may be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from forebay.sections.base import Section, Sizes


class Batch(Section):
    """The bounds of a micro-batch, and of what waits in front of it."""

    max_batch_size: int = Field(32, ge=1, description="most rows of a batch")
    max_wait_ms: float = Field(
        5.0, ge=0, allow_inf_nan=False, description="from the oldest request's arrival; used by linger"
    )
    dispatch: Literal["eager", "linger", "static", "defer"] = Field(
        "eager",
        description="eager: never idle while a request waits; linger: wait to fill; static: full batches only; "
        "defer: as late as the deadlines allow, for a GPU that is shared or metered",
    )
    linger_for: Literal["arrivals", "backlog"] = Field(
        "arrivals",
        description="what linger waits for: whatever may still come, or only records known to be in the topics",
    )
    cost: Literal["rows", "elements", "bytes"] = Field(
        "rows", description="what a request weighs against max_batch_cost"
    )
    max_batch_cost: int | None = Field(None, ge=1, description="most cost of a batch, padded; default no bound")
    max_batch_bytes: int = Field(
        67_108_864, ge=1024, description="most bytes of a batch's inputs; sizes the staging slots"
    )
    allowed_batch_sizes: Sizes = Field(
        (), description="rows that the model may run with, increasing: others are padded up; default any"
    )
    padding: Literal["min_cost", "pad_up", "batch_down"] = Field(
        "min_cost",
        description="between two allowed sizes: the cheaper by the measured curve, the larger with repeated rows, or "
        "the smaller, leaving the rest",
    )
    shape_buckets: Sizes = Field(
        (),
        description="lengths that dimensions with a pad value are padded to, increasing; beyond the last, and by "
        "default, requests of like lengths go together, padded to the longest",
    )
    target_latency_ms: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="batches grow only as far as the measured curve keeps this"
    )
    default_timeout_ms: int = Field(
        0, ge=0, description="deadline of a request that names none, from its record's timestamp; 0: none"
    )
    tenant_header: str | None = Field(
        None, min_length=1, description="record header that names a tenant; the model's time is shared between tenants"
    )
    max_queue_size: int | None = Field(None, ge=1, description="requests that wait or run; default 8 × max_batch_size")
    max_queue_bytes: int = Field(67_108_864, ge=1024, description="most bytes of records held before no more are read")
    priority_aging_ms: int = Field(1_000, ge=1, description="a waiting request rises one priority level per this")

    @model_validator(mode="after")
    def _linger_waits(self) -> Batch:
        if self.dispatch == "linger" and self.max_wait_ms == 0:
            raise ValueError("dispatch linger needs max_wait_ms above 0; use dispatch eager to never wait")
        if self.dispatch == "defer" and self.default_timeout_ms == 0:
            raise ValueError("dispatch defer waits for deadlines: set default_timeout_ms for requests that name none")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Batch:
        for name in ("allowed_batch_sizes", "shape_buckets"):
            sizes = getattr(self, name)
            if any(size < 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} must be whole numbers from 1, each larger than the one before")
        if self.allowed_batch_sizes and self.allowed_batch_sizes[-1] > self.max_batch_size:
            raise ValueError(
                f"allowed_batch_sizes goes up to {self.allowed_batch_sizes[-1]}, above max_batch_size "
                f"{self.max_batch_size}: raise max_batch_size or remove the larger sizes"
            )
        return self

    @property
    def minds_backlog(self) -> bool:
        """Whether it matters for cutting a batch that more records are known to be in the topics."""
        return bool(self.allowed_batch_sizes) or self.linger_for == "backlog"

    @property
    def queue_size(self) -> int:
        """Requests that may wait or be in flight before partitions are paused."""
        return self.max_queue_size or 8 * self.max_batch_size


class Limits(Section):
    """What one request may be; a larger one gets `too_large` or `invalid_payload` before it costs anything."""

    max_request_bytes: int = Field(33_554_432, ge=64, description="of a record's value")
    max_headers: int = Field(64, ge=8, description="of a record")
    max_header_bytes: int = Field(16_384, ge=256, description="of all headers of a record together")
