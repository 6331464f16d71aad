"""The outbox of exactly-once mode: outcomes, dead letters and offsets commit in one Kafka transaction.

A transaction begins when the model is done and lasts for produce and commit only. Outcomes arrive here in the order of
their partition, so a transaction always covers a prefix and its offset says all. An abortable error is tried again
with the same outcomes. Where the end is unknown the producer is replaced, which fences a late request of the old one,
and the partitions are read again from the committed offsets: librdkafka lacks KIP-890.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import confluent_kafka as ck

from forebay import failpoints
from forebay.errors import ConfigError, KafkaFatalError
from forebay.records import Outcome, Partition
from forebay.stream.patience import Patience
from forebay.stream.results import Encoder
from forebay.stream.verdicts import Verdict, amend, verdict_on
from forebay.watchdog import leave_within

_GROUP = {
    ck.KafkaError.ILLEGAL_GENERATION,
    ck.KafkaError.UNKNOWN_MEMBER_ID,
    ck.KafkaError.REBALANCE_IN_PROGRESS,
    ck.KafkaError.FENCED_INSTANCE_ID,
}
_FENCED = {ck.KafkaError._FENCED, ck.KafkaError.PRODUCER_FENCED, ck.KafkaError.INVALID_PRODUCER_EPOCH}
_MOST_OUTCOMES = 10_000
_BAD_TOPIC_SECONDS = 60.0
_START_SECONDS = 30.0
_BEGIN_SECONDS = 2.0


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
        self._patience = Patience()
        self._client: Any = None
        self._has_begun = self._is_in_doubt = False
        self._logger: logging.Logger | None = None
        self._waiting: list[Outcome] = []
        self._refused: list[tuple[Outcome, Verdict, str]] = []
        self._verdicts: dict[tuple[str, int, int], tuple[Verdict, str]] = {}
        self._bad_topics: dict[str, tuple[float, str]] = {}
        self._alone = 0
        self._now = self._again_at = self._began = 0.0
        self._committed: dict[Partition, int] = {}
        self._pause = 0.1
        self.notes: Callable[[Mapping[Partition, int]], Mapping[Partition, str]] = lambda marks: {}
        """What the offsets of a transaction say in their metadata."""
        self.limits: dict[str, int] = {}
        self.topics: tuple[str, ...] = (encoder.output_topic, dead_letter_topic)
        self.unacknowledged = 0
        self.dead_letters: list[str] = []
        self.settled_in: list[float] = []  # seconds of each transaction
        self.trouble: str | None = None
        self.must_rewind = False

    def start(self, logger: logging.Logger | None = None) -> None:
        """Make the producer and fence an earlier life of this worker. Raises ConfigError, KafkaFatalError."""
        self._logger = logger or logging.getLogger("forebay.kafka")
        if self.limits:
            self._config["batch.size"] = max(min(1_000_000, *self.limits.values()) * 9 // 10, 1_024)
        try:
            self._client = ck.Producer(self._config, logger=self._logger)
        except ck.KafkaException as error:
            raise ConfigError(f"the Kafka client refuses the settings: {error.args[0].str()}") from error
        self._begin_anew(_START_SECONDS)
        if not self._has_begun:
            raise KafkaFatalError(f"the transactional producer cannot start: {self.trouble}")

    @property
    def is_ready(self) -> bool:
        """Whether a transaction may begin: the producer is there, and the positions are those that are committed."""
        if not self._has_begun:
            self._begin_anew(_BEGIN_SECONDS)
        return self._has_begun and not self.must_rewind

    def send(self, outcome: Outcome, now: float) -> None:
        """Let an outcome wait for the next transaction."""
        self.unacknowledged += 1
        record = outcome.record
        known = self._verdicts.get((record.topic, record.partition, record.offset))
        bad = self._bad_topics.get(outcome.topic)
        limit = self.limits.get(outcome.topic)
        if known is not None:
            amend(outcome, *known, self._encoder)
        elif bad is not None and now < bad[0]:
            amend(outcome, Verdict.NO_SUCH_TOPIC, bad[1], self._encoder)
        elif outcome.failure is None and limit is not None and len(outcome.value) > limit - 1024:
            amend(outcome, Verdict.TOO_LARGE, "", self._encoder)
        self._waiting.append(outcome)

    def serve(self, now: float, wait: float = 0.0) -> list[Outcome]:
        """Commit what waits in one transaction; return the outcomes that are safe since."""
        if not self.is_ready:
            return []
        if not self._waiting:
            self.trouble = None  # what failed was dropped with its partitions
            self._client.poll(wait)
            return []
        if now < self._again_at:
            self._client.poll(0)
            return []
        self._now = now
        self._began = time.perf_counter()
        chosen = self._waiting[: 1 if self._alone else _MOST_OUTCOMES]
        try:
            with leave_within(self._timeout * 3, KafkaFatalError.exit_code):
                self._transact(chosen)
        except ck.KafkaException as error:
            self._failed(error.args[0], now)
            return []
        self.settled_in.append(time.perf_counter() - self._began)
        del self._waiting[: len(chosen)]
        self._alone = max(self._alone - 1, 0)
        self.unacknowledged -= len(chosen)
        for outcome in chosen:
            record = outcome.record
            self._committed[Partition(record.topic, record.partition)] = record.offset + 1
            if self._verdicts:
                self._verdicts.pop((record.topic, record.partition, record.offset), None)
        self.dead_letters += [o.failure.code for o in chosen if o.failure is not None and self._has_dead_letter(o)]
        self.trouble, self._pause = None, 0.1
        return chosen

    @property
    def is_refused(self) -> bool:
        """Whether transactions fail, and say so."""
        return self.trouble is not None

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

    def commit(self, marks: dict[Partition, int], notes: Mapping[Partition, str]) -> None:
        """Commit offsets without outcomes, behind which only markers or skipped records were, with their metadata.

        Never by the consumer: its commit could overtake a transaction's and move the group back.
        """
        self._began = time.perf_counter()
        with leave_within(self._timeout * 3, KafkaFatalError.exit_code):
            self._client.begin_transaction()
            self._send_offsets(marks, notes)
            self._client.commit_transaction(self._timeout)

    def failed(self, error: ck.KafkaException, now: float) -> None:
        """Take in that `commit` failed."""
        self._failed(error.args[0], now)

    def close(self) -> None:
        """Drop the producer; a transaction that is open is fenced by the next start or times out."""
        self._client = None

    def _transact(self, chosen: list[Outcome]) -> None:
        client = self._client
        marks: dict[Partition, int] = {}
        client.begin_transaction()
        for outcome in chosen:
            self._produce(outcome)
            record = outcome.record
            marks[Partition(record.topic, record.partition)] = record.offset + 1
        notes = self.notes(marks)
        failpoints.hit("in_transaction")
        self._send_offsets(marks, notes)
        failpoints.hit("before_transaction_commit")
        client.commit_transaction(self._timeout)
        failpoints.hit("after_transaction_commit")

    def _send_offsets(self, marks: Mapping[Partition, int], notes: Mapping[Partition, str]) -> None:
        offsets = [ck.TopicPartition(*place, mark, notes.get(place, "")) for place, mark in marks.items()]
        send, member = self._client.send_offsets_to_transaction, self._group_metadata()
        try:
            self._patience.call(lambda: send(offsets, member, self._timeout), self._timeout * 1.5)
        except TimeoutError as error:
            raise ck.KafkaException(ck.KafkaError(ck.KafkaError._TIMED_OUT, str(error))) from error

    def _produce(self, outcome: Outcome) -> None:
        key, partition = outcome.id.encode(), -1 if outcome.partition is None else outcome.partition
        self._queue(outcome, outcome.topic, outcome.value, key, partition, outcome.headers)
        if self._has_dead_letter(outcome):
            headers, record = self._encoder.dead_letter(outcome), outcome.record
            value, place = record.value, (record.topic, record.partition, record.offset)
            if place in self._verdicts and self._verdicts[place][0] is Verdict.LETTER_TOO_LARGE:
                own = [pair for pair in headers or () if pair[0].startswith(("kafka_dlt-", "forebay-"))]
                headers, value = [*own, ("forebay-value-left-out", b"too large for this topic")], None
            self._queue(outcome, self._dead_letter_topic, value, record.key, -1, headers)

    def _queue(self, outcome: Outcome, topic: str, value: Any, key: Any, partition: int, headers: Any) -> None:
        report = functools.partial(self._reported, outcome, topic)
        while True:
            try:
                self._client.produce(topic, value, key, partition, report, headers=headers)
                return
            except BufferError:
                self._client.poll(0.05)
            except ck.KafkaException as error:
                self._reported(outcome, topic, error.args[0], None)
                raise

    def _has_dead_letter(self, outcome: Outcome) -> bool:
        return outcome.failure is not None and self._encoder.dead_letter(outcome) is not None

    def _reported(self, outcome: Outcome, topic: str, error: Any, message: Any) -> None:
        if error is not None:
            is_letter = topic == self._dead_letter_topic and topic != outcome.topic
            verdict = verdict_on(error, outcome, self._encoder.output_topic, is_letter=is_letter)
            if verdict is not None:
                self._refused.append((outcome, verdict, error.str()))

    def _amend_refused(self, together: int) -> None:
        """Change what the brokers refused so that they take it; remember it, should the records be read again."""
        large = {Verdict.TOO_LARGE, Verdict.LETTER_TOO_LARGE}
        for outcome, verdict, why in self._refused:
            if verdict in large and together > 1:
                self._alone = together  # a topic that takes less than a batch refuses whole batches: try them alone
                continue
            record = outcome.record
            self._verdicts[record.topic, record.partition, record.offset] = (verdict, why)
            if verdict is Verdict.NO_SUCH_TOPIC:
                self._bad_topics[outcome.topic] = (self._now + _BAD_TOPIC_SECONDS, why)
            amend(outcome, verdict, why, self._encoder)
        self._refused.clear()

    def _failed(self, error: Any, now: float) -> None:
        """Decide what a failed transaction means; afterwards nothing of it is visible, or its end is looked up."""
        self.trouble = f"a transaction failed: {error.str()}"
        self._again_at, self._pause = now + self._pause, min(self._pause * 1.5, 5.0)
        if error.code() in _FENCED and time.perf_counter() - self._began < self._timeout * 0.9:
            raise KafkaFatalError(
                f"another worker uses the transactional id {self._config['transactional.id']!r} and has fenced this "
                f"one ({error.str()}); give each worker its own delivery.transactional_id"
            )
        # Fenced after so long it is by the coordinator, which has given the transaction up: nobody else need be there.
        refused, together = bool(self._refused), 1 if self._alone else min(len(self._waiting), _MOST_OUTCOMES)
        if refused or (error.txn_requires_abort() and error.code() != ck.KafkaError._TIMED_OUT):
            try:
                self._client.abort_transaction(self._timeout)
            except ck.KafkaException:
                # With a refused message in it, it was never committed: its outcomes may be sent again as they are.
                self._replace_producer(rewind=not refused)
            self._amend_refused(together)
            if refused:
                self._again_at = now
            elif error.code() in _GROUP:
                self._again_at = now + 0.02  # the rebalance that is under way says which outcomes are still ours
            return
        self._replace_producer(rewind=True)

    def _replace_producer(self, *, rewind: bool) -> None:
        """Start over with the same id: what the old producer may still have under way is fenced."""
        self._client, self._has_begun = None, False
        self._is_in_doubt = self._is_in_doubt or rewind
        self._client = ck.Producer(self._config, logger=self._logger)
        self._begin_anew(_BEGIN_SECONDS)

    def _begin_anew(self, seconds: float) -> None:
        """Fence what came before; in an outage it is tried again for as long as that takes.

        The committed offsets are final only afterwards: before, a late commit of the old producer may still come.
        """
        try:
            with leave_within(seconds * 3 + _START_SECONDS, KafkaFatalError.exit_code):
                self._client.init_transactions(seconds)
        except ck.KafkaException as error:
            cause = error.args[0]
            said = f"the transactional producer {self._config['transactional.id']!r} cannot start: {cause.str()}"
            if not (cause.retriable() or cause.code() == ck.KafkaError._TIMED_OUT):
                raise KafkaFatalError(said) from error
            self.trouble = said  # the next call goes on with the same request
        else:
            self._has_begun = True
            self.must_rewind, self._is_in_doubt = self.must_rewind or self._is_in_doubt, False
