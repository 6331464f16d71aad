"""The outbox of exactly-once mode: outcomes, dead letters and offsets commit in one Kafka transaction.

A transaction begins when the model is done and lasts for produce and commit only. It ends on a thread of its own, and
what is finished meanwhile shares the next one. Outcomes arrive here in the order of their partition, so a transaction
always covers a prefix and its offset says all. Two producers take turns, one transaction at a time: the brokers may
still be writing the markers of the one before. An abortable error is tried again with the same outcomes. Where the end
is unknown the producer is replaced, which fences a late request of the old one, and the partitions are read again from
the committed offsets: librdkafka lacks KIP-890.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import confluent_kafka as ck

from forebay.errors import ConfigError, KafkaFatalError, KafkaUnavailableError
from forebay.records import Outcome, Partition, Record
from forebay.stream.patience import Patience
from forebay.stream.refusals import Refusals
from forebay.stream.results import Encoder
from forebay.stream.transaction import Portion, Terms, Transaction
from forebay.stream.transactional_producer import Pause, TransactionalProducer

_GROUP = {
    ck.KafkaError.ILLEGAL_GENERATION,
    ck.KafkaError.UNKNOWN_MEMBER_ID,
    ck.KafkaError.REBALANCE_IN_PROGRESS,
    ck.KafkaError.FENCED_INSTANCE_ID,
}
_FENCED = {ck.KafkaError._FENCED, ck.KafkaError.PRODUCER_FENCED, ck.KafkaError.INVALID_PRODUCER_EPOCH}
_PATIENCE = 1.5  # times `transaction.timeout.ms` until a transaction is given up here; the brokers do it after one
_OVERDUE = 0.9  # of `transaction.timeout.ms`: what failed after so long did so because it took too long
_LONGEST_WAIT = 10.0  # of the loop itself, in seconds: it must be seen to live, however long a transaction may last
_LOOK_SECONDS = 0.1
_START_SECONDS = 30.0
_BEGIN_SECONDS = 2.0
_SECOND = ".second"
"""What stands behind the worker's transactional id in that of its other producer."""


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
        self._group_metadata = group_metadata
        self._timeout = config["transaction.timeout.ms"] / 1000
        self._patience = Patience()
        self._portion = Portion(self._timeout)
        self._pause = Pause()
        second = config | {"transactional.id": config["transactional.id"] + _SECOND}
        self._producer, self._other = (TransactionalProducer(own, self._pause) for own in (config, second))
        self._waiting: list[Outcome] = []
        self._ending: Transaction | None = None  # it has the first of those that wait
        self._closed: list[Outcome] = []
        self._refusals = Refusals(encoder)
        self._terms = Terms(encoder, dead_letter_topic, self._refusals, self._timeout)
        self._now = self._again_at = self._began = self._doubtful_until = 0.0
        self._committed: dict[Partition, int] = {}
        self.notes: Callable[[Mapping[Partition, int]], Mapping[Partition, str]] = lambda marks: {}
        """What the offsets of a transaction say in their metadata."""
        self.limits: dict[str, int] = {}
        self.topics: tuple[str, ...] = (encoder.output_topic, dead_letter_topic)
        self.unacknowledged = 0
        self.dead_letters: list[str] = []
        self.settled_in: list[float] = []  # seconds of each transaction
        self.trouble: str | None = None
        self.must_rewind = False
        self.keeps: Callable[[Record], bool] = lambda record: True

    def start(self, logger: logging.Logger | None = None) -> None:
        """Make the producers and fence an earlier life of this worker.

        Raises ConfigError, KafkaFatalError, and KafkaUnavailableError where nobody answers any more.
        """
        producers = (self._producer, self._other)
        for producer in producers:
            if self.limits:
                producer.config["batch.size"] = max(min(1_000_000, *self.limits.values()) * 9 // 10, 1_024)
            producer.make(logger or logging.getLogger("forebay.kafka"))
        self._begin_anew(_START_SECONDS)
        for producer in producers:
            if producer.is_forbidden:
                raise ConfigError(producer.trouble)
            if not producer.has_begun:
                raise KafkaUnavailableError(producer.trouble)

    @property
    def is_ready(self) -> bool:
        """Whether a transaction may begin: the producers are there, and the positions are those that are committed."""
        return self._begin_anew(_BEGIN_SECONDS) and not self.must_rewind

    def take_credentials(self, username: str, password: str) -> None:
        """Let both producers log in by these; a transaction under way goes on."""
        for producer in (self._producer, self._other):
            producer.take_credentials(username, password)

    def send(self, outcome: Outcome, now: float) -> None:
        """Let an outcome wait for the next transaction."""
        self.unacknowledged += 1
        self._refusals.foresee(outcome, self.limits.get(outcome.topic), now)
        self._waiting.append(outcome)

    def serve(self, now: float, wait: float = 0.0) -> list[Outcome]:
        """Let the transaction end that is under way, and begin the next; return the outcomes that are safe since."""
        self._now = now
        if self._ending:
            self._end(now)
        if not self._ending and self.is_ready:
            self._begin(now, wait)
        closed, self._closed = self._closed, []
        return closed

    def _begin(self, now: float, wait: float) -> None:
        """Begin a transaction with what waits."""
        if not self._waiting and now >= self._doubtful_until:
            self.trouble = None  # what failed was dropped with its partitions
        if not self._waiting or now < self._again_at:
            self._other.client.poll(0)
            self._producer.client.poll(0 if self._waiting else wait)
            return
        self._began = time.perf_counter()
        chosen = self._waiting[: 1 if self._refusals.alone else self._portion.outcomes]
        marks = {Partition(o.record.topic, o.record.partition): o.record.offset + 1 for o in chosen}
        self._ending = self._transaction(chosen, marks, self.notes(marks))
        self._patience.begin(self._ending.run, self._timeout * _PATIENCE)

    def _end(self, now: float, wait: float = 0.0) -> None:
        """Take in that the transaction under way has ended, if it has."""
        ended = self._ending
        try:
            if ended is None or not self._patience.ended(wait):
                return
        except TimeoutError as error:
            self._failed(ck.KafkaError(ck.KafkaError._TIMED_OUT, str(error)), now)
            return
        except ck.KafkaException as error:
            self._failed(error.args[0], now)
            return
        self.settled_in.append(took := self._patience.value - self._began)
        self._portion.ended(took)
        chosen, self._ending = ended.outcomes, None
        del self._waiting[: len(chosen)]
        self._refusals.settled(chosen)
        self.unacknowledged -= len(chosen)
        for outcome in chosen:
            record = outcome.record
            self._committed[Partition(record.topic, record.partition)] = record.offset + 1
            if outcome.failure is not None and self._terms.has_dead_letter(outcome):
                self.dead_letters.append(outcome.failure.code)
        self.trouble = None
        self._pause.reset()
        self._closed += chosen
        self._take_turns()

    @property
    def is_refused(self) -> bool:
        """Whether transactions fail, and say so."""
        return self.trouble is not None

    def take_committed(self) -> dict[Partition, int]:
        """Return the offsets that transactions have committed since the last call."""
        marks, self._committed = self._committed, {}
        return marks

    def forget(self, partitions: Iterable[Partition]) -> list[Outcome]:
        """Drop what waits for partitions that were taken away; a transaction that is under way ends first."""
        while self._ending:
            self._end(self._now, _LOOK_SECONDS)
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
        try:
            seconds = min(self._timeout * _PATIENCE, _LONGEST_WAIT)
            self._patience.call(self._transaction([], marks, notes).run, seconds)
            self._take_turns()
        except TimeoutError as error:
            raise ck.KafkaException(ck.KafkaError(ck.KafkaError._TIMED_OUT, str(error))) from error

    def failed(self, error: ck.KafkaException, now: float) -> None:
        """Take in that `commit` failed."""
        self._failed(error.args[0], now)

    def close(self) -> None:
        """Drop the producers; a transaction that is open is fenced by the next start or times out."""
        self._producer.client = self._other.client = None

    def _transaction(
        self, outcomes: list[Outcome], marks: Mapping[Partition, int], notes: Mapping[Partition, str]
    ) -> Transaction:
        offsets = [ck.TopicPartition(*place, mark, notes.get(place, "")) for place, mark in marks.items()]
        return Transaction(self._producer.client, outcomes, offsets, self._group_metadata(), self._terms)

    def _take_turns(self) -> None:
        """Let the other producer have the next transaction: this one would wait until its markers are written."""
        self._producer, self._other = self._other, self._producer

    def _failed(self, error: Any, now: float) -> None:
        """Decide what a failed transaction means; afterwards nothing of it is visible, or its end is looked up."""
        self.trouble = f"a transaction failed: {error.str()}"
        self._again_at = now + self._pause.next()
        is_overdue = time.perf_counter() - self._began >= self._timeout * _OVERDUE
        if error.code() in _FENCED and not is_overdue:
            raise KafkaFatalError(
                f"another worker uses the transactional id {self._config['transactional.id']!r} and has fenced this "
                f"one ({error.str()}); give each worker its own delivery.transactional_id"
            )
        # Fenced after so long it is by the coordinator, which has given the transaction up: nobody else need be there.
        ended, self._ending = self._ending, None
        if is_overdue and ended is not None:
            self._take_less(len(ended.outcomes), now)
        refused = ended is not None and bool(ended.reports)
        if refused or (error.txn_requires_abort() and error.code() != ck.KafkaError._TIMED_OUT):
            try:
                self._producer.client.abort_transaction(min(self._timeout, _LONGEST_WAIT))
            except ck.KafkaException:
                # With a refused message in it, it was never committed: its outcomes may be sent again as they are.
                self._replace_producer(rewind=not refused)
            if ended is not None:
                self._refusals.heed(ended.reports, len(ended.outcomes), self._now)
            if refused:
                self._again_at = now
            elif error.code() in _GROUP:
                self._again_at = now + 0.02  # the rebalance that is under way says which outcomes are still ours
            return
        self._replace_producer(rewind=True)

    def _take_less(self, tried: int, now: float) -> None:
        """Try again with fewer outcomes; until one transaction has succeeded, or none is due for long, all is not well.

        An outage looks the same from here, and costs a few small transactions after it.
        """
        self._portion.overdue(tried)
        self._doubtful_until = now + 2 * self._timeout
        self.trouble = (
            f"{self.trouble}; it had {tried} outcomes and was not through in delivery.transaction_timeout_ms, the next "
            f"has {self._portion.outcomes} at most: where the brokers are well a slow link or a quota holds it up"
        )

    def _replace_producer(self, *, rewind: bool) -> None:
        """Start over with the same id: what the old client may still have under way is fenced."""
        self._producer.replace(in_doubt=rewind)
        self._begin_anew(_BEGIN_SECONDS)

    def _begin_anew(self, seconds: float) -> bool:
        """Begin with the producers that have not begun; return whether all have. Raises KafkaFatalError."""
        for producer in (self._producer, self._other):
            if not producer.has_begun:
                self.must_rewind = producer.begin(seconds, self._now) or self.must_rewind
                if not producer.has_begun:
                    self.trouble = producer.trouble or self.trouble
                    return False
        return True
