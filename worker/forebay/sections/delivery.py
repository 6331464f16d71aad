"""The settings of what is promised about outcomes, and of how long endings may take."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
        description="exactly_once: stable, unique per worker; default GROUP-HOST-N with the lowest N free on the host",
    )
    transaction_timeout_ms: int = Field(
        10_000, ge=1_000, description="exactly_once: after this a successor may take over from a dead worker"
    )

    @property
    def order_of_results(self) -> Literal["none", "partition", "key"]:
        """The order that is kept: a transaction's offset covers a prefix of its partition, so it needs that order."""
        return "partition" if self.guarantee == "exactly_once" else self.ordering
