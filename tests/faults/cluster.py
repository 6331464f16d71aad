"""Three brokers for a test to hurt: who leads what, who coordinates whom, bounces, and a load that lasts as long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import reduce
from types import TracebackType
from typing import Any, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient  # type: ignore[attr-defined]

from forebay.broker import EmbeddedKafka
from forebay.errors import ForebayError
from tests.faults.dumps import report
from tests.faults.history import Report
from tests.integration.job import Job, ask, ask_binary
from tests.kafka_probe import KafkaProbe, eventually

BROKERS = 3
GROUPS, TRANSACTIONS = "__consumer_offsets", "__transaction_state"
_SYNC_SECONDS = _PROGRESS_SECONDS = 180
_BACKLOG, _PORTION = 1_500, 500


class PatientProbe(KafkaProbe):
    """A view of Kafka whose clients turn to another broker soon where one takes a question and does not answer."""

    @property
    def config(self) -> dict[str, Any]:
        """A librdkafka configuration that reaches this cluster."""
        return {**super().config, "socket.timeout.ms": 3_000}


class Cluster:
    """Three brokers, numbered from 0 as `EmbeddedKafka` does it; every topic has a replica on each."""

    def __init__(self, kafka: EmbeddedKafka) -> None:
        self.kafka = kafka
        self.probe = PatientProbe(kafka.bootstrap_servers)
        self._admin = AdminClient(self.probe.config)

    def leader(self, topic: str, partition: int = 0) -> int:
        """Return the broker that leads a partition."""
        found = eventually(lambda: max(self._leaders(topic).get(partition, 0), 0), f"{topic} has a leader", 90)
        return int(found) - 1

    def coordinator(self, name: str, topic: str = GROUPS) -> int:
        """Return the broker that coordinates a group, or with `TRANSACTIONS` a transactional id."""
        count = len(eventually(lambda: self._leaders(topic), f"{topic} is known"))
        return self.leader(topic, _java_hash(name) % count)

    def _leaders(self, topic: str) -> dict[int, int]:
        with contextlib.suppress(KafkaException, KeyError):
            parts = self._admin.list_topics(topic, timeout=5).topics[topic].partitions
            return {number: int(part.leader) for number, part in parts.items()}
        return {}

    def bounce(self, broker: int, *, hard: bool) -> None:
        """Stop a broker in order, or kill it, and start it again; returns once it answers."""
        if hard:
            self.kafka.kill(broker)
        else:
            self.kafka.stop_broker(broker)
        self.kafka.restart(broker)

    def await_in_sync(self, *topics: str) -> None:
        """Return once every partition of these topics, and of Kafka's own, has all of its replicas in sync."""

        def in_sync() -> bool:
            with contextlib.suppress(KafkaException, ForebayError, KeyError):
                known = self._admin.list_topics(timeout=5).topics
                own = [topic for topic in (GROUPS, TRANSACTIONS) if topic in known]
                parts = [part for topic in (*topics, *own) for part in known[topic].partitions.values()]
                return all(len(part.isrs) == BROKERS and part.leader >= 0 for part in parts)
            return False

        eventually(in_sync, f"all replicas of {', '.join(topics)} are in sync", _SYNC_SECONDS, 0.2)


def _java_hash(name: str) -> int:
    """Return Java's hash of a string without its sign: by this Kafka picks the partition of a group or an id."""
    unsigned = reduce(lambda total, char: (31 * total + ord(char)) & 0xFFFFFFFF, name, 0)
    return unsigned if unsigned < 1 << 31 else (1 << 32) - unsigned


@contextlib.contextmanager
def three_brokers() -> Iterator[Cluster]:
    """Start three brokers and stop them at the end."""
    with EmbeddedKafka(BROKERS) as kafka:
        yield Cluster(kafka)


def await_more(job: Job, count: int) -> None:
    """Wait for so many more outcomes; what no broker answers for now is asked again."""

    def answered() -> int:
        with contextlib.suppress(ForebayError):
            return job.answered()
        return 0

    before = eventually(answered, f"{job.results} can be read", _PROGRESS_SECONDS)
    eventually(lambda: answered() >= before + count, f"{count} more outcomes", _PROGRESS_SECONDS, 0.1)


def reports(job: Job) -> tuple[Report, ...]:
    """Return what is known of the workers.

    Where one has read again, what was committed behind its back is in no counter: they may say less than the logs then,
    and never more.
    """
    unheard = (
        [Report("ends that nobody heard of")] if any(one.events("partitions_rewound") for one in job.workers) else []
    )
    return (*map(report, job.workers), *unheard)


class Load:
    """Sends requests while the block runs, on a thread of its own, so that there are always some to answer.

    How many are ahead of the answers is bounded: the run must come to its end. What a broker does not acknowledge is
    let go: whatever got into the input counts.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        job, sent = self._job, 0
        while not self._end.wait(0.1):
            with contextlib.suppress(ForebayError, AssertionError):
                if sum(job.kafka.end_offsets(job.requests).values()) - job.answered() < _BACKLOG:
                    numbers = range(sent, sent + _PORTION)
                    sent += _PORTION
                    records = (ask(n) if n % 2 else ask_binary(n) for n in numbers)
                    job.kafka.produce(job.requests, records, request_timeout_ms=3_000, message_timeout_ms=20_000)
