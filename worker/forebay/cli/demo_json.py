"""How the demo looks to a program: one JSON object per event on standard output, the rest on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from forebay.broker import Broker
from forebay.cli.demo_report import Arrival, Summary
from forebay.cli.demo_view import KINDS, STAND_IN, Act, Step


class JsonView:
    """For a program: one object per line with its `event`; the rest on standard error."""

    def opening(self) -> None:
        """Say nothing."""

    @contextmanager
    def step(self, doing: str) -> Iterator[Step]:
        """Note the step."""
        step = Step()
        self.note(doing)
        yield step
        if step.result:
            self.note(step.result)

    def note(self, line: str) -> None:
        """Say it on standard error."""
        print(f"forebay: {line}", file=sys.stderr, flush=True)

    def describe(self, broker: Broker) -> str:
        """Print the broker as an event, and name it."""
        _emit("broker", kind=broker.kind, real=broker.is_real, bootstrap_servers=broker.bootstrap_servers)
        return f"{KINDS[broker.kind]}, on {broker.bootstrap_servers}"

    def warn_of_stand_in(self) -> None:
        """Say it on standard error; the event has said `real` is false."""
        self.note(STAND_IN)

    def act(self, act: Act, requests: int) -> None:
        """Say nothing: each result tells whether it was alone."""

    def arrival(self, arrival: Arrival) -> None:
        """Print a result."""
        answer = arrival.answer
        _emit(
            "result",
            sample=arrival.sample.name,
            label=answer.label if answer else None,
            score=answer.score if answer else None,
            right=arrival.is_right,
            alone=arrival.alone,
            batch_size=arrival.batch_size,
            latency_ms=round(arrival.latency_ms, 3),
            error=arrival.error,
        )

    def summary(self, summary: Summary) -> None:
        """Print the summary."""
        _emit("summary", **asdict(summary), mean_batch_size=summary.mean_batch_size, all_right=summary.all_right)

    def log_of_worker(self, lines: str) -> None:
        """Say it on standard error."""
        self.note(f"the end of the worker's log:\n{lines}")


def _emit(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)
