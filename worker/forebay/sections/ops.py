"""The settings of the HTTP port and the log."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forebay.sections.base import Section


class Ops(Section):
    """The HTTP port and the log."""

    host: str = Field(
        "127.0.0.1", description="address of the HTTP port for metrics and health; it has no authentication"
    )
    port: int = Field(8080, ge=0, le=65_535, description="0 takes a free port and logs it")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto: console on a terminal, JSON elsewhere"
    )
    tracing: bool | None = Field(
        None,
        description="send OpenTelemetry spans (extra otel) as the OTEL_ variables say; null: where those name an "
        "exporter or its endpoint; see docs/tracing.md",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is written")
