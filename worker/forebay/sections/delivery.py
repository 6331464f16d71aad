"""The settings of what is promised about outcomes, and of how long endings may take."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from forebay.sections.base import Section


class Delivery(Section):
    """What is promised about outcomes, and how long endings may take."""

    guarantee: Literal["at_least_once", "exactly_once"] = Field(
        "at_least_once", description="what holds when something dies: see docs/guarantees.md"
    )
    ordering: Literal["none", "partition", "key"] = Field(
        "none", description="none: as they finish; partition, key: in the input's order; exactly_once: always partition"
    )
    max_attempts: int = Field(3, ge=1, description="runs of a request that kills its replica, before it is poisoned")
    breaker: bool = Field(
        True,
        description="a batch that fails whole is answered only if the model still runs its warm-up example; else it "
        "waits, and the worker is not ready, until the model works again; false: every failure is answered",
    )
    drain_timeout_ms: int = Field(
        25_000, ge=0, description="for what is in flight at SIGTERM; keep it below the orchestrator's grace period"
    )
    revoke_timeout_ms: int = Field(5_000, ge=0, description="how long a revoked partition may hold up the group")
    commit_interval_ms: int = Field(200, ge=1, description="between two commits of the low watermarks")
    transactional_id: str | None = Field(
        None,
        description="exactly_once: stable, unique per worker, which also uses it with .second behind it; default "
        "GROUP-HOST-N with the lowest N free on the host",
    )
    transaction_timeout_ms: int = Field(
        10_000, ge=1_000, description="exactly_once: after this a successor may take over from a dead worker"
    )

    deduplicate_ms: int = Field(
        0,
        ge=0,
        description="a request id gets one outcome per partition within this time, by record timestamps; where a "
        "request has no id of its own its record key is the id; 0: every record is answered; see docs/guarantees.md",
    )
    deduplicate_max_ids: int = Field(
        100_000,
        ge=1_000,
        description="ids that a partition remembers at most, about 200 bytes each; the newest half stay",
    )
    deduplicate_rebuild_bytes: int = Field(
        268_435_456, ge=1_048_576, description="of a newly assigned partition's past, read again for its ids at most"
    )

    share_group: bool = Field(
        False,
        description="EXPERIMENTAL, queue mode (KIP-932, Apache Kafka 4.2 or newer): kafka.group_id is a share group, "
        "more workers than partitions share the load, at least once and in no order; see docs/guarantees.md",
    )

    @model_validator(mode="after")
    def _share_group_fits(self) -> Delivery:
        if not self.share_group:
            return self
        if self.guarantee == "exactly_once":
            raise ValueError("share_group has no transactions: remove guarantee exactly_once, or share_group")
        if self.ordering != "none":
            raise ValueError(f"share_group keeps no order: remove ordering {self.ordering}, or share_group")
        if self.deduplicate_ms:
            raise ValueError(
                "share_group delivers two records of one id to different workers, so none of them can know both: "
                "remove deduplicate_ms, or share_group"
            )
        return self

    @property
    def order_of_results(self) -> Literal["none", "partition", "key"]:
        """The order that is kept: a transaction's offset covers a prefix of its partition, so it needs that order."""
        return "partition" if self.guarantee == "exactly_once" else self.ordering
