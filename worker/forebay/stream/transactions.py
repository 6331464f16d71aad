"""The outbox of exactly-once mode: outcomes, dead letters and offsets commit in one Kafka transaction.

A transaction begins when the model is done and lasts for produce and commit only. Outcomes arrive here in the order of
their partition, so a transaction always covers a prefix and its offset says all. An abortable error is tried again
with the same outcomes. Where the end is unknown the producer is replaced, which fences a late request of the old one,
and the partitions are read again from the committed offsets: librdkafka lacks KIP-890.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import confluent_kafka as ck

from forebay.errors import ConfigError, KafkaFatalError
from forebay.records import Outcome, Partition
from forebay.stream.committer import Answer
from forebay.stream.offsets import Offsets
from forebay.stream.results import Encoder
from forebay.watchdog import leave_within

_TOO_LARGE = {ck.KafkaError.MSG_SIZE_TOO_LARGE, ck.KafkaError.RECORD_LIST_TOO_LARGE}
_GROUP = {
    ck.KafkaError.ILLEGAL_GENERATION,
    ck.KafkaError.UNKNOWN_MEMBER_ID,
    ck.KafkaError.REBALANCE_IN_PROGRESS,
    ck.KafkaError.FENCED_INSTANCE_ID,
}
_FENCED = {ck.KafkaError._FENCED, ck.KafkaError.PRODUCER_FENCED, ck.KafkaError.INVALID_PRODUCER_EPOCH}
_MOST_OUTCOMES = 10_000
_START_SECONDS = 30.0


class TransactionalOutbox:
    """Sends outcomes exactly once. The group's membership comes from `group_metadata`, fresh for each transaction."""

    def __init__(
        self,
        config: dict[str, Any],
        encoder: Encoder,
        dead_letter_topic: str,
        group_metadata: Callable[[], Any],
    ) -> None:
        self._config = config
        self._encoder = encoder
        self._dead_letter_topic = dead_letter_topic
        self._group_metadata = group_metadata
        self._timeout = config["transaction.timeout.ms"] / 1000
        self._client: Any = None
        self._logger: logging.Logger | None = None
        self._waiting: list[Outcome] = []
        self._oversize: list[Outcome] = []
        self._committed: dict[Partition, int] = {}
        self._again_at = 0.0
        self._pause = 0.1
        self.limits: dict[str, int] = {}
        self.unacknowledged = 0
        self.dead_letters: list[str] = []
        self.trouble: str | None = None
        self.must_rewind = False

    def start(self, logger: logging.Logger | None = None) -> None:
        """Make the producer and fence an earlier life of this worker. Raises ConfigError, KafkaFatalError."""
        self._logger = logger or logging.getLogger("forebay.kafka")
        try:
            self._client = ck.Producer(self._config, logger=self._logger)
        except ck.KafkaException as error:
            raise ConfigError(f"the Kafka client refuses the settings: {error.args[0].str()}") from error
        self._begin_anew()

    def send(self, outcome: Outcome, now: float) -> None:
        """Let an outcome wait for the next transaction."""
        self.unacknowledged += 1
        if outcome.failure is None:
            limit = self.limits.get(outcome.topic)
            if limit is not None and len(outcome.value) > limit - 1024:
                self._replace(outcome)
        self._waiting.append(outcome)

    def serve(self, now: float, wait: float = 0.0) -> list[Outcome]:
        """Commit what waits in one transaction; return the outcomes that are safe since."""
        if not self._waiting:
            self._client.poll(wait)
            return []
        if now < self._again_at:
            self._client.poll(0)
            return []
        chosen = self._waiting[:_MOST_OUTCOMES]
        try:
            with leave_within(self._timeout * 3, KafkaFatalError.exit_code):
                self._transact(chosen)
        except ck.KafkaException as error:
            self._failed(error.args[0], now)
            return []
        del self._waiting[: len(chosen)]
        self.unacknowledged -= len(chosen)
        for outcome in chosen:
            self._committed[Partition(outcome.record.topic, outcome.record.partition)] = outcome.record.offset + 1
        self.dead_letters += [o.failure.code for o in chosen if o.failure is not None and self._has_dead_letter(o)]
        self.trouble, self._pause = None, 0.1
        return chosen

    def take_committed(self) -> dict[Partition, int]:
        """Return the offsets that transactions have committed since the last call."""
        marks, self._committed = self._committed, {}
        return marks

    def forget(self, partitions: Iterable[Partition]) -> list[Outcome]:
        """Drop what waits for partitions that were taken away."""
        gone = set(partitions)
        dropped = [o for o in self._waiting if (o.record.topic, o.record.partition) in gone]
        self._waiting = [o for o in self._waiting if (o.record.topic, o.record.partition) not in gone]
        self.unacknowledged -= len(dropped)
        return dropped

    def commit(self, marks: dict[Partition, int]) -> None:
        """Commit offsets without outcomes, behind which only markers or skipped records were.

        Never by the consumer: its commit could overtake a transaction's and move the group back.
        """
        with leave_within(self._timeout * 3, KafkaFatalError.exit_code):
            self._client.begin_transaction()
            offsets = [ck.TopicPartition(*partition, mark) for partition, mark in marks.items()]
            self._client.send_offsets_to_transaction(offsets, self._group_metadata(), self._timeout)
            self._client.commit_transaction(self._timeout)

    def failed(self, error: ck.KafkaException, now: float) -> None:
        """Take in that `commit` failed."""
        self._failed(error.args[0], now)

    def close(self) -> None:
        """Drop the producer; a transaction that is open is fenced by the next start or times out."""
        self._client = None

    def _transact(self, chosen: list[Outcome]) -> None:
        client = self._client
        marks: dict[tuple[str, int], int] = {}
        client.begin_transaction()
        for outcome in chosen:
            self._produce(outcome)
            record = outcome.record
            marks[record.topic, record.partition] = record.offset + 1
        offsets = [ck.TopicPartition(topic, partition, mark) for (topic, partition), mark in marks.items()]
        client.send_offsets_to_transaction(offsets, self._group_metadata(), self._timeout)
        client.commit_transaction(self._timeout)

    def _produce(self, outcome: Outcome) -> None:
        key, partition = outcome.id.encode(), -1 if outcome.partition is None else outcome.partition
        self._queue(outcome, outcome.topic, outcome.value, key, partition, outcome.headers)
        if self._has_dead_letter(outcome):
            headers = self._encoder.dead_letter(outcome)
            record = outcome.record
            self._queue(outcome, self._dead_letter_topic, record.value, record.key, -1, headers)

    def _queue(self, outcome: Outcome, topic: str, value: Any, key: Any, partition: int, headers: Any) -> None:
        report = partial(self._reported, outcome)
        while True:
            try:
                self._client.produce(topic, value, key, partition, report, headers=headers)
                return
            except BufferError:
                self._client.poll(0.05)

    def _has_dead_letter(self, outcome: Outcome) -> bool:
        return outcome.failure is not None and self._encoder.dead_letter(outcome) is not None

    def _reported(self, outcome: Outcome, error: Any, message: Any) -> None:
        if error is not None and error.code() in _TOO_LARGE:
            self._oversize.append(outcome)

    def _replace(self, outcome: Outcome) -> None:
        """Put an error in the place of a result that its topic does not take."""
        message = f"the result has {len(outcome.value)} bytes, more than {outcome.topic} takes"
        replaced = self._encoder.too_large(outcome, message)
        outcome.value, outcome.headers, outcome.failure = replaced.value, replaced.headers, replaced.failure

    def _failed(self, error: Any, now: float) -> None:
        """Decide what a failed transaction means; afterwards nothing of it is visible, or its end is looked up."""
        self.trouble = f"a transaction failed: {error.str()}"
        self._again_at, self._pause = now + self._pause, min(self._pause * 1.5, 5.0)
        if error.code() in _FENCED:
            raise KafkaFatalError(
                f"another worker uses the transactional id {self._config['transactional.id']!r} and has fenced this "
                f"one ({error.str()}); give each worker its own delivery.transactional_id"
            )
        if error.txn_requires_abort() and error.code() not in (ck.KafkaError._TIMED_OUT,):
            try:
                self._client.abort_transaction(self._timeout)
            except ck.KafkaException:
                self._replace_producer()
                return
            for outcome in self._oversize:
                if outcome.failure is None:
                    self._replace(outcome)
            self._oversize.clear()
            if error.code() in _GROUP:
                self._again_at = now + 0.02  # the rebalance that is under way says which outcomes are still ours
            return
        self._replace_producer()

    def _replace_producer(self) -> None:
        """Start over with the same id: what the old producer may still have under way is fenced."""
        self._client = None
        self._oversize.clear()
        self.must_rewind = True
        self._client = ck.Producer(self._config, logger=self._logger)
        self._begin_anew()

    def _begin_anew(self) -> None:
        try:
            with leave_within(_START_SECONDS * 3, KafkaFatalError.exit_code):
                self._client.init_transactions(_START_SECONDS)
        except ck.KafkaException as error:
            raise KafkaFatalError(
                f"the transactional producer {self._config['transactional.id']!r} cannot start: {error.args[0].str()}"
            ) from error


class TransactionalCommitter:
    """The offsets of exactly-once mode: they were committed with their outcomes, but for what the consumer skipped."""

    def __init__(self, outbox: TransactionalOutbox, offsets: Offsets, interval: float) -> None:
        self._outbox = outbox
        self._offsets = offsets
        self._interval = interval
        self._committed_at = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether everything that may be committed is committed."""
        return not self._outbox.unacknowledged and not self._offsets.committable()

    def settle(self, now: float, *, idle: bool) -> list[Answer]:
        """Take over what transactions have committed; commit what lies behind the last outcome when all is idle."""
        answers: list[Answer] = []
        marks = self._outbox.take_committed()
        if marks:
            self._note(marks)
            answers.append((marks, {}))
        if idle and not self._outbox.unacknowledged and now - self._committed_at >= self._interval:
            behind = self._offsets.committable()
            if behind:
                self._committed_at = now
                try:
                    self._outbox.commit(behind)
                except ck.KafkaException as error:
                    self._outbox.failed(error, now)
                    answers.append((behind, dict.fromkeys(behind, error.args[0].name())))
                else:
                    self._note(behind)
                    answers.append((behind, {}))
        return answers

    def leave(self, partitions: Iterable[Partition]) -> None:
        """Do nothing: what is finished was committed with its outcomes."""

    def _note(self, marks: dict[Partition, int]) -> None:
        self._offsets.requested(marks)
        for partition, mark in marks.items():
            self._offsets.committed(partition, mark)
