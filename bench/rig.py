"""What the benchmarks share: a broker, topics with a backlog, a worker or a bare loop as a process, and rates.

Rates are read from the times at which the broker appended the results, for every contestant alike: results after the
first, over the time between first and last. Only ratios inside one run mean anything on a shared machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import confluent_kafka as ck

from forebay.broker import EmbeddedKafka
from forebay.stream.admin import create_topics

HERE = Path(__file__).resolve().parent
Message = tuple[bytes, list[tuple[str, bytes]]]


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics of one measurement."""

    requests: str
    results: str
    dead: str


@contextlib.contextmanager
def broker() -> Iterator[str]:
    """Start Kafka on loopback and yield its address."""
    with EmbeddedKafka() as kafka:
        yield kafka.bootstrap_servers


def make_topics(address: str, partitions: int = 4) -> Topics:
    """Create fresh topics."""
    name = uuid.uuid4().hex[:8]
    topics = Topics(f"requests-{name}", f"results-{name}", f"dead-{name}")
    config = {"bootstrap.servers": address}
    create_topics(config, {topics.requests: partitions, topics.dead: 1})
    create_topics(config, {topics.results: partitions}, topic_config={"message.timestamp.type": "LogAppendTime"})
    return topics


def fill(address: str, topic: str, messages: Iterable[Message]) -> None:
    """Publish a backlog."""
    producer = ck.Producer({"bootstrap.servers": address, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    for number, (value, headers) in enumerate(messages):
        while True:
            try:
                producer.produce(topic, value, b"%d" % number, headers=headers)
                break
            except BufferError:
                producer.poll(0.1)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()


def worker_command(address: str, topics: Topics, settings: dict[str, object], *options: str) -> list[str]:
    """Return the command of a worker."""
    values: dict[str, object] = {
        "kafka.bootstrap_servers": address,
        "kafka.input_topics": topics.requests,
        "kafka.output_topic": topics.results,
        "kafka.dead_letter_topic": topics.dead,
        "kafka.group_id": uuid.uuid4().hex,
        "ops.port": 0,
        "ops.log_level": "warning",
        **settings,
    }
    command = [sys.executable, "-m", "forebay", "run", *options]
    for key, value in values.items():
        command += ["--set", f"{key}={json.dumps(value) if isinstance(value, dict) else value}"]
    return command


def environment() -> dict[str, str]:
    """Return what a contestant runs in: it finds the models here and the tests' beside, and then what we find."""
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(command: Sequence[str], timeout: float = 300.0, folder: Path = HERE) -> None:
    """Run a contestant to its end, in a folder; its exit must be clean."""
    with tempfile.TemporaryFile() as log:
        result = subprocess.run(command, cwd=folder, env=environment(), timeout=timeout, stderr=log, check=False)
        if result.returncode:
            log.seek(0)
            raise SystemExit(f"{command[:5]} ended with {result.returncode}:\n{log.read().decode()[-3000:]}")


def rate(address: str, topic: str, expected: int) -> float:
    """Return results per second, from the times at which the broker appended them."""
    consumer = ck.Consumer(
        {"bootstrap.servers": address, "group.id": uuid.uuid4().hex, "auto.offset.reset": "earliest"}
    )
    partitions = consumer.list_topics(topic).topics[topic].partitions
    consumer.assign([ck.TopicPartition(topic, number, 0) for number in partitions])
    stamps: list[int] = []
    deadline = time.monotonic() + 60
    while len(stamps) < expected and time.monotonic() < deadline:
        stamps += [message.timestamp()[1] for message in consumer.consume(10_000, 0.5) if message.error() is None]
    consumer.close()
    if len(stamps) != expected:
        raise SystemExit(f"{topic} has {len(stamps)} results, {expected} were expected")
    return (len(stamps) - 1) / max((max(stamps) - min(stamps)) / 1000, 0.001)


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)
