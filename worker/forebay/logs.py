"""Logging: structlog on standard error, JSON for machines or colours for a terminal; fixed event names with fields."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import structlog

from forebay.settings import Ops

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(ops: Ops) -> None:
    """Set up structlog and the standard library's logging, which carries the Kafka client's own lines."""
    console = ops.log_format == "console" or (ops.log_format == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    colours = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    renderer: Any = structlog.dev.ConsoleRenderer(colors=colours) if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[ops.log_level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(formatter)
    client = logging.getLogger("forebay.kafka")
    client.handlers = [output]
    client.propagate = False
    client.setLevel(logging.WARNING if ops.log_level != "debug" else logging.DEBUG)


def logger(name: str) -> Any:
    """Return a logger for one room."""
    return structlog.get_logger(room=name)
