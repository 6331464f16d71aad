"""A reload of a model that runs in the worker's own process, inline and in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from forebay.testing import MemoryBroker, make_worker, memory_settings
from forebay.wire import Result, parse_outcome
from forebay.worker import Worker
from tests.kafka_probe import eventually
from tests.unit.builders import as_floats, vector_request
from tests.unit.test_reloading import P0, ROOT, events


@pytest.fixture(autouse=True)
def log() -> Iterator[list[Any]]:
    """What the worker logs."""
    with capture_logs() as found:
        yield found


def await_turns(worker: Worker, done: Callable[[], bool], what: str) -> None:
    """Let a worker turn until something is done."""

    def turned() -> bool:
        worker._turn()
        return done()

    eventually(turned, what, 60, 0.001)


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_a_model_that_runs_in_the_workers_own_process_is_replaced_too(executor: str, log: list[Any]) -> None:
    broker = MemoryBroker({"requests": 1, "results": 1, "dead": 1})
    values: dict[str, Any] = {"model.factory": "tests.models:Shifted", "inference.executor": executor}
    worker, _, _ = make_worker(broker, memory_settings(values), ROOT)
    worker.reloading.read = lambda: memory_settings(values)
    answers: list[tuple[float, str]] = []

    def ask(name: str) -> None:
        value, headers = vector_request(1.0)
        broker.append("requests", value, name.encode(), headers, 0)
        await_turns(worker, lambda: len(broker.records("results")) > len(answers), f"{name} is answered")
        found = broker.records("results")[-1]
        result = parse_outcome(found.value or b"", found.headers)
        assert isinstance(result, Result)
        answers.append((as_floats(bytes(result["y"]))[0], (dict(found.headers)["model-version"] or b"").decode()))  # type: ignore[arg-type]

    assert worker._warm_up()
    worker._join()
    threads = threading.active_count()
    try:
        ask("a")
        for version, options in (("2", {"by": 100.0}), ("3", {"fails": True}), ("4", {"by": 300.0})):
            values |= {"model.version": version, "model.options": options}
            event = "reload_failed" if "fails" in options else "model_reloaded"
            told = len(events(log, event))
            worker.reloading.ask()
            await_turns(worker, lambda name=event, before=told: len(events(log, name)) > before, event)
            ask(version)
        await_turns(worker, lambda: threading.active_count() <= threads, "the old threads have ended")
        assert answers == [(3.0, "1"), (103.0, "2"), (103.0, "2"), (303.0, "4")]
        worker._drain()
        assert broker.committed == {P0: 4}
    finally:
        worker._leave()
