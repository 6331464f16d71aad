"""Reads what a run left behind in a real Kafka, for the checker: topics, committed offsets over time, workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType

from confluent_kafka import Consumer, KafkaException, TopicPartition
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.checker import verify
from tests.faults.double import double_answers
from tests.faults.history import Answers, Fault, History, Logged, Place, Position, Promise, Report, Sample
from tests.integration.job import Job
from tests.integration.worker_process import WorkerProcess
from tests.kafka_probe import KafkaProbe, Read, eventually

_EVERY_SECONDS = 0.1
_ASK_SECONDS = 5.0


class Watch:
    """Samples a job's committed offsets while the block runs, on a thread of its own, and keeps the faults.

    with Watch(job, Promise()) as watch:
        worker.kill()
        watch.fault("killed")
        job.run_to_end()
    watch.verify()
    """

    def __init__(self, job: Job, promise: Promise, answers: Answers | None = double_answers) -> None:
        self._job = job
        self._promise = promise
        self._answers = answers
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._before: list[Place] = []
        self._blinks = 0
        self.samples: list[Sample] = []
        self.faults: list[Fault] = []

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def fault(self, name: str, *, since_start: bool = False) -> None:
        """Note that a worker has died: what is committed now is what it committed, so only the rest may be repeated.

        `since_start` is for one that was frozen: by now others have committed what it was about to.
        """
        job = self._job
        committed = {} if since_start else job.kafka.committed_offsets(job.group, job.requests)
        self.faults.append(Fault(name, committed, job.kafka.end_offsets(job.requests)))

    @contextmanager
    def blind(self) -> Iterator[None]:
        """Keep no sample that has anything to do with the time of this block.

        A broker that wakes from a freeze tells the end of a log as it was, until it hears that another leads it by now.
        """
        self._blinks += 1
        try:
            yield
        finally:
            self._blinks += 1

    def history(self, **changes: object) -> History:
        """Return the run as it is in Kafka now. `changes` replace fields: secrets, a journal, other reports."""
        history = dump(self._job, self._promise, self._answers)
        kept = {"samples": tuple(self.samples), "faults": tuple(self.faults), **changes}
        return replace(history, **kept)  # type: ignore[arg-type]

    def verify(self, **changes: object) -> History:
        """Fail if an invariant is broken; return the history. Ask only after the block."""
        history = self.history(**changes)
        assert len(self.samples) > 1, "nothing was sampled"
        verify(history)
        return history

    def _look(self) -> None:
        """Take the offsets first, then the ends of the logs: an outcome that was committed lies below them."""
        job = self._job
        consumer = Consumer(
            {
                **job.kafka.config,
                "group.id": job.group,
                "enable.auto.commit": False,
                "isolation.level": "read_uncommitted",
            }
        )
        asked = [TopicPartition(*place) for place in job.kafka.end_offsets(job.requests)]
        logs = [TopicPartition(*place) for place in job.kafka.end_offsets(job.results, job.dead)]
        try:
            while not self._end.wait(_EVERY_SECONDS):
                before = self._blinks
                try:
                    found = consumer.committed(asked, timeout=_ASK_SECONDS)
                    ends = {
                        (p.topic, p.partition): consumer.get_watermark_offsets(p, timeout=_ASK_SECONDS)[1] for p in logs
                    }
                except KafkaException:
                    continue  # the broker is away, which may be what the test is about
                if self._blinks == before and before % 2 == 0:
                    self.samples.append(
                        Sample({(p.topic, p.partition): p.offset for p in found if p.offset >= 0}, ends)
                    )
        finally:
            consumer.close()


def dump(job: Job, promise: Promise, answers: Answers | None = double_answers) -> History:
    """Return a job's topics, offsets and workers as they are now."""
    kafka = job.kafka
    outcomes, letters = _read(kafka, job.results), _read(kafka, job.dead)
    seen = {record.position for topic in (job.results, job.dead) for record in _read(kafka, topic, committed_only=True)}
    invisible: set[Position] = {record.position for record in (*outcomes, *letters)} - seen
    return History(
        promise,
        _read(kafka, job.requests, committed_only=True),
        outcomes,
        letters,
        frozenset(invisible),
        kafka.committed_offsets(job.group, job.requests),
        {place: end for place, end in kafka.end_offsets(job.requests).items() if end},
        _stable(kafka, promise, job.results, job.dead),
        workers=tuple(map(report, job.workers)),
        answers=answers,
    )


def report(worker: WorkerProcess) -> Report:
    """Return what is known of a worker; one that still runs is asked for its counters."""
    code = worker.process.poll()
    counters = None
    texts = {"log": worker.text()}
    if code is None:
        status, text = worker.get("/metrics")
        if status == 200:
            counters, texts["metrics"] = _counters(text), text
    allowed = frozenset({-signal.SIGKILL} if worker.was_killed else {0})
    return Report(worker.log.stem, 0 if code is None else code, allowed, counters, texts=texts)


def _counters(text: str) -> dict[str, float]:
    counters: dict[str, float] = {"dead_letters": 0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = {"forebay_requests_total": sample.labels.get("outcome", "")}.get(sample.name)
            if sample.name == "forebay_dead_letters_total":
                name = "dead_letters"
            if name is not None:
                counters[name] = counters.get(name, 0) + sample.value
    return counters


def _read(kafka: KafkaProbe, topic: str, *, committed_only: bool = False) -> tuple[Logged, ...]:
    return logged(kafka.read_all(topic, committed_only=committed_only))


def logged(records: Iterable[Read]) -> tuple[Logged, ...]:
    """Return records as the checker reads them."""
    return tuple(Logged(r.topic, r.partition, r.offset, r.key, r.value, tuple(r.headers)) for r in records)


def _stable(kafka: KafkaProbe, promise: Promise, *topics: str) -> dict[Place, tuple[int, int]]:
    """Return the last stable offsets and the ends; a settled run has a moment to close its last transaction."""
    ends = kafka.end_offsets(*topics)

    def stable() -> dict[Place, int]:
        return kafka.end_offsets(*topics, committed_only=True)

    if promise.settled:
        with suppress(AssertionError):  # the checker says it, with the place
            eventually(lambda: stable() == ends, "the last transactions are closed", 10)
    found = stable()
    return {place: (found[place], end) for place, end in ends.items()}
