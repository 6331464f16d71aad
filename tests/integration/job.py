"""One job for workers to do: topics, a group, requests with answers that can be checked, and the workers themselves.

The requests are for `tests.models:Double`; they are written and read here without the worker's own codec, so that a
test never checks our code with our code.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from forebay.errors import ForebayError
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import KafkaProbe, Read, Send, eventually

Floats = npt.NDArray[np.float32]
QUICK = {
    "session.timeout.ms": 3000,
    "heartbeat.interval.ms": 300,
    "topic.metadata.refresh.interval.ms": 1000,
    "topic.metadata.propagation.max.ms": 1000,
}
"""Client properties that let the group notice a death soon, and a client a missing topic."""


class Job:
    """Topics of its own on a broker, a group of its own, and any number of workers."""

    def __init__(self, kafka: KafkaProbe, folder: Path, partitions: int = 3, **topic_config: Any) -> None:
        unique = uuid.uuid4().hex[:10]
        self.kafka = kafka
        self.folder = folder
        self.requests, self.results, self.dead = (f"{kind}-{unique}" for kind in ("requests", "results", "dead"))
        self.group = f"group-{unique}"
        self.workers: list[WorkerProcess] = []
        kafka.create_topics({self.requests: partitions, self.results: 3, self.dead: 1}, **topic_config)

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Return a worker's settings, with `changes` (double underscores for dots) on top."""
        return {
            "kafka.bootstrap_servers": self.kafka.bootstrap_servers,
            "kafka.input_topics": self.requests,
            "kafka.output_topic": self.results,
            "kafka.dead_letter_topic": self.dead,
            "kafka.group_id": self.group,
            "kafka.client": QUICK,
            "model.factory": "tests.models:Double",
            **{key.replace("__", "."): value for key, value in changes.items()},
        }

    def launch(self, arguments: Sequence[str] = (), failpoints: str = "", **changes: Any) -> WorkerProcess:
        """Start a worker and return at once."""
        log = self.folder / f"worker-{len(self.workers)}.log"
        worker = WorkerProcess(self.settings(**changes), log, arguments, failpoints)
        self.workers.append(worker)
        return worker

    def start(self, **changes: Any) -> WorkerProcess:
        """Start a worker and return when it is ready."""
        return self.launch(**changes).await_ready()

    def run_to_end(self, **changes: Any) -> WorkerProcess:
        """Run a worker until everything that is in the input now is answered; it must end with 0."""
        worker = self.launch(["--until-end"], **changes)
        code = worker.wait(180)
        assert code == 0, f"the worker ended with {code}:\n{worker.text()}"
        return worker

    def send(self, records: Iterable[Send]) -> int:
        """Publish requests."""
        return self.kafka.produce(self.requests, records)

    def answered(self) -> int:
        """Return the number of outcomes."""
        return sum(self.kafka.end_offsets(self.results).values())

    def await_answered(self, count: int, timeout_s: float = 120.0) -> None:
        """Wait until there are at least `count` outcomes."""
        eventually(lambda: self.answered() >= count, f"{count} outcomes", timeout_s, 0.1)

    def await_settled(self, timeout_s: float = 120.0) -> list[Read]:
        """Wait until the group has committed the input's ends; return the outcomes."""
        eventually(self.is_settled, f"{self.requests} is settled", timeout_s, 0.1)
        return self.outcomes()

    def is_settled(self) -> bool:
        """Whether every partition that holds something is committed to its end."""
        ends = {place: end for place, end in self.kafka.end_offsets(self.requests).items() if end}
        return ends.items() <= self.kafka.committed_offsets(self.group, self.requests).items()

    def outcomes(self) -> list[Read]:
        """Return every outcome."""
        return self.kafka.read_all(self.results)

    def dead_letters(self) -> list[Read]:
        """Return every dead letter."""
        return self.kafka.read_all(self.dead)

    def close(self) -> None:
        """End every worker and remove the topics."""
        for worker in self.workers:
            worker.close()
        self.kafka.delete_topics(self.requests, self.results, self.dead)


MakeJob = Callable[..., Job]


@contextmanager
def jobs(folder: Path) -> Iterator[MakeJob]:
    """Yield a factory of jobs, `make(kafka, partitions=3)`, that are closed at the end."""
    made: list[Job] = []

    def make(kafka: KafkaProbe, partitions: int = 3, **topic_config: Any) -> Job:
        own = folder / f"job-{len(made)}"
        own.mkdir()
        made.append(Job(kafka, own, partitions, **topic_config))
        return made[-1]

    try:
        yield make
    finally:
        for worker in [worker for job in made for worker in job.workers]:
            worker.close()
        for job in made:
            with suppress(ForebayError):  # its broker may be gone, which is what the test was about
                job.close()


@pytest.fixture
def make_job(tmp_path: Path, quick_workers: None) -> Iterator[MakeJob]:
    """A factory of jobs on any broker: `make_job(kafka, partitions=3)`. What they started ends with the test."""
    with jobs(tmp_path) as make:
        yield make


@pytest.fixture
def job(kafka: KafkaProbe, make_job: MakeJob) -> Job:
    """A job on the session's broker."""
    return make_job(kafka)


def rows(number: int, count: int = 1) -> Floats:
    """Return the rows of request `number`: no two requests have an equal one."""
    return np.array([[number + 1, row, 1, 2] for row in range(count)], np.float32)


def ask(number: int, count: int = 1, **options: Any) -> Send:
    """Return request `number` as JSON, with its number as id and key."""
    return ask_rows(str(number), rows(number, count), **options)


def ask_rows(id: str, x: Floats, **options: Any) -> Send:
    """Return a JSON request with these rows. `options` are those of Send, and `parameters`."""
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}
    body = {"id": id, "inputs": [tensor]}
    if "parameters" in options:
        body["parameters"] = options.pop("parameters")
    return Send(json.dumps(body).encode(), id.encode(), **options)


def ask_binary(number: int, count: int = 1, headers: Sequence[tuple[str, bytes | None]] = ()) -> Send:
    """Return request `number` in the binary encoding."""
    x = rows(number, count)
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"id": str(number), "inputs": [tensor]}).encode()
    own = [
        ("content-type", b"application/octet-stream"),
        ("inference-header-content-length", str(len(head)).encode()),
    ]
    return Send(head + x.astype("<f4").tobytes(), str(number).encode(), [*own, *headers])


def magic(id: str, value: int) -> Send:
    """Return a request whose row makes `Double` misbehave."""
    return ask_rows(id, np.array([[value, 0, 0, 0]], np.float32))


def answer(outcome: Read) -> Floats:
    """Return what a result holds for `y`, read by hand."""
    assert outcome.value is not None
    assert outcome.header("status") == b"ok", outcome.value
    length = outcome.header("inference-header-content-length")
    body = json.loads(outcome.value[: int(length)] if length else outcome.value)
    [output] = body["outputs"]
    shape = output["shape"]
    if length is None:
        return np.array(output["data"], np.float32).reshape(shape)
    raw = outcome.value[int(length) :]
    assert output["parameters"]["binary_data_size"] == len(raw)
    return np.array(struct.unpack(f"<{len(raw) // 4}f", raw), np.float32).reshape(shape)


def error_code(outcome: Read) -> str:
    """Return the code of an error result; header and body must agree."""
    assert outcome.value is not None
    assert outcome.header("status") == b"error", outcome
    code: str = json.loads(outcome.value)["code"]
    assert outcome.header("error-code") == code.encode()
    return code


def check_answers(outcomes: Iterable[Read], counts: Mapping[int, int] | None = None) -> None:
    """Fail unless every outcome is a result that is right for the request of its key."""
    for outcome in outcomes:
        assert outcome.key is not None
        number = int(outcome.key)
        expected = rows(number, (counts or {}).get(number, 1)) * 2 + 1
        np.testing.assert_array_equal(answer(outcome), expected, f"the answer of request {number}")


def check_once(outcomes: Iterable[Read], ids: Iterable[str]) -> None:
    """Fail unless there is exactly one outcome of each request."""
    found = Counter((outcome.key or b"").decode() for outcome in outcomes)
    expected = set(ids)
    twice = sorted(id for id, number in found.items() if number > 1)
    assert not expected - found.keys(), (
        f"{len(expected - found.keys())} have no outcome: {_few(expected - found.keys())}"
    )
    assert not found.keys() - expected, f"nobody asked for {_few(found.keys() - expected)}"
    assert not twice, f"{len(twice)} of {len(expected)} have more than one outcome: {_few(twice)}"


def check_nothing_lost(outcomes: Iterable[Read], ids: Iterable[str]) -> int:
    """Fail unless each request has an outcome, and all of one request name one source; returns the duplicates."""
    sources: dict[str, set[bytes | None]] = defaultdict(set)
    total = 0
    for outcome in outcomes:
        sources[(outcome.key or b"").decode()].add(outcome.header("source"))
        total += 1
    missing = set(ids) - sources.keys()
    assert not missing, f"{len(missing)} have no outcome: {_few(missing)}"
    mixed = [id for id, places in sources.items() if len(places) != 1]
    assert not mixed, f"outcomes of one request name several sources: {_few(mixed)}"
    return total - len(sources)


def _few(ids: Iterable[str]) -> str:
    listed = sorted(ids)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
