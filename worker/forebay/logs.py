"""Logging: structlog on standard error, JSON for machines or colours for a terminal; fixed event names with fields."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO, cast

import structlog

from forebay.settings import Ops

_SAME_LINE_SECONDS = 10.0
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Output:
    """Standard error for log lines; a full disk, or a reader of the log that is gone, costs lines and never the worker.

    It writes past Python's buffer, which would keep a line that failed and fail with it again at exit.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._raw = getattr(getattr(stream, "buffer", None), "raw", None)
        self.lost = 0

    def write(self, text: str) -> int:
        """Write, or count what could not be written; the first line that can be is told how many are missing."""
        try:
            if self.lost:
                self._put(f"({self.lost} log lines before this one could not be written)\n")
                self.lost = 0
            self._put(text)
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.lost += text.count("\n")
        return len(text)

    def flush(self) -> None:
        """Do nothing: every line is out."""

    def _put(self, text: str) -> None:
        if self._raw is None:
            self._stream.write(text)
            self._stream.flush()
            return
        left = memoryview(text.encode(errors="replace"))
        while left:
            left = left[self._raw.write(left) or 0 :]


class Seldom(logging.Filter):
    """Lets a kind of line of a library through once in ten seconds: of a dead broker the client has twenty a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._told: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is new; what the client tries again by itself is not worth one."""
        line = record.getMessage()
        if line.endswith("retrying"):
            return False
        kind = line.split(" ", 1)[0]
        now = self._clock()
        if now - self._told.get(kind, -_SAME_LINE_SECONDS) < _SAME_LINE_SECONDS:
            return False
        self._told[kind] = now
        return True


def configure(ops: Ops, **fields: str) -> None:
    """Set up structlog and the standard library's logging: lines of the Kafka client and of OpenTelemetry.

    `fields` are in every line of every thread.
    """
    output = Output(sys.stderr)
    console = ops.log_format == "console" or (ops.log_format == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        lambda _, __, event: {**event, **fields},
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    colours = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    renderer: Any = structlog.dev.ConsoleRenderer(colors=colours) if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[ops.log_level]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, output)),  # it needs write and flush alone
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, _without_traceback],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    lines = logging.StreamHandler(output)
    lines.setFormatter(formatter)
    for name in ("forebay.kafka", "opentelemetry"):
        library = logging.getLogger(name)
        library.handlers = [lines]
        library.propagate = False
        library.setLevel(logging.WARNING if ops.log_level != "debug" else logging.DEBUG)
    lines.addFilter(Seldom())  # at the output: a logger's own filter does not see the lines of the loggers below it


def _without_traceback(_: Any, __: str, event: Any) -> Any:
    """Say what a library raised in one line."""
    raised = event.pop("exc_info", None)
    if isinstance(raised, tuple) and raised[1] is not None:
        event["error"] = f"{type(raised[1]).__name__}: {raised[1]}"
    return event


def logger(name: str) -> Any:
    """Return a logger for one room."""
    return structlog.get_logger(room=name)
