"""The outbox of exactly-once mode: outcomes, dead letters and offsets commit in one Kafka transaction.

A transaction begins when the model is done and lasts for produce and commit only. It ends on a thread of its own, and
what is finished meanwhile shares the next one. Outcomes arrive here in the order of their partition, so a transaction
always covers a prefix and its offset says all. An abortable error is tried again with the same outcomes. Where the end
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
from forebay.watchdog import leave_within

_GROUP = {
    ck.KafkaError.ILLEGAL_GENERATION,
    ck.KafkaError.UNKNOWN_MEMBER_ID,
    ck.KafkaError.REBALANCE_IN_PROGRESS,
    ck.KafkaError.FENCED_INSTANCE_ID,
}
_FENCED = {ck.KafkaError._FENCED, ck.KafkaError.PRODUCER_FENCED, ck.KafkaError.INVALID_PRODUCER_EPOCH}
_FORBIDDEN = {ck.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, ck.KafkaError.CLUSTER_AUTHORIZATION_FAILED}
_PATIENCE = 1.5  # times `transaction.timeout.ms` until a transaction is given up here; the brokers do it after one
_OVERDUE = 0.9  # of `transaction.timeout.ms`: what failed after so long did so because it took too long
_LONGEST_WAIT = 10.0  # of the loop itself, in seconds: it must be seen to live, however long a transaction may last
_LOOK_SECONDS = 0.1
_START_SECONDS = 30.0
_BEGIN_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


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
        self._client: Any = None
        self._has_begun = self._is_in_doubt = self._is_forbidden = False
        self._logger: logging.Logger | None = None
        self._waiting: list[Outcome] = []
        self._ending: Transaction | None = None  # it has the first of those that wait
        self._closed: list[Outcome] = []
        self._refusals = Refusals(encoder)
        self._terms = Terms(encoder, dead_letter_topic, self._refusals, self._timeout)
        self._now = self._again_at = self._anew_at = self._began = self._doubtful_until = 0.0
        self._committed: dict[Partition, int] = {}
        self._pause = _FIRST_PAUSE
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
        """Make the producer and fence an earlier life of this worker.

        Raises ConfigError, KafkaFatalError, and KafkaUnavailableError where nobody answers any more.
        """
        self._logger = logger or logging.getLogger("forebay.kafka")
        if self.limits:
            self._config["batch.size"] = max(min(1_000_000, *self.limits.values()) * 9 // 10, 1_024)
        try:
            self._client = ck.Producer(self._config, logger=self._logger)
        except ck.KafkaException as error:
            raise ConfigError(f"the Kafka client refuses the settings: {error.args[0].str()}") from error
        self._begin_anew(_START_SECONDS)
        if self._is_forbidden:
            raise ConfigError(self.trouble)
        if not self._has_begun:
            raise KafkaUnavailableError(self.trouble)

    @property
    def is_ready(self) -> bool:
        """Whether a transaction may begin: the producer is there, and the positions are those that are committed."""
        if not self._has_begun and self._now >= self._anew_at:
            self._begin_anew(_BEGIN_SECONDS)
        return self._has_begun and not self.must_rewind

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
            self._client.poll(0 if self._waiting else wait)
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
        self.trouble, self._pause = None, _FIRST_PAUSE
        self._closed += chosen

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
        except TimeoutError as error:
            raise ck.KafkaException(ck.KafkaError(ck.KafkaError._TIMED_OUT, str(error))) from error

    def failed(self, error: ck.KafkaException, now: float) -> None:
        """Take in that `commit` failed."""
        self._failed(error.args[0], now)

    def close(self) -> None:
        """Drop the producer; a transaction that is open is fenced by the next start or times out."""
        self._client = None

    def _transaction(
        self, outcomes: list[Outcome], marks: Mapping[Partition, int], notes: Mapping[Partition, str]
    ) -> Transaction:
        offsets = [ck.TopicPartition(*place, mark, notes.get(place, "")) for place, mark in marks.items()]
        return Transaction(self._client, outcomes, offsets, self._group_metadata(), self._terms)

    def _failed(self, error: Any, now: float) -> None:
        """Decide what a failed transaction means; afterwards nothing of it is visible, or its end is looked up."""
        self.trouble = f"a transaction failed: {error.str()}"
        self._again_at = now + self._next_pause()
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
                self._client.abort_transaction(min(self._timeout, _LONGEST_WAIT))
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

    def _next_pause(self) -> float:
        """Return how long to wait before the next try; the one after it comes later."""
        pause, self._pause = self._pause, min(self._pause * 1.5, _LONGEST_PAUSE)
        return pause

    def _replace_producer(self, *, rewind: bool) -> None:
        """Start over with the same id: what the old producer may still have under way is fenced."""
        self._client, self._has_begun = None, False
        self._is_in_doubt = self._is_in_doubt or rewind
        self._begin_anew(_BEGIN_SECONDS)

    def _begin_anew(self, seconds: float) -> None:
        """Fence what came before; in an outage, or without the right to the id, it is tried again and again.

        The committed offsets are final only afterwards: before, a late commit of the old producer may still come.
        """
        if self._client is None:
            self._client = ck.Producer(self._config, logger=self._logger)
        try:
            with leave_within(seconds * 3 + _START_SECONDS, KafkaFatalError.exit_code):
                self._client.init_transactions(seconds)
        except ck.KafkaException as error:
            self._not_begun(error)
        else:
            self._has_begun, self._is_forbidden = True, False
            self.must_rewind, self._is_in_doubt = self.must_rewind or self._is_in_doubt, False

    def _not_begun(self, error: ck.KafkaException) -> None:
        """Decide what it means that the producer has not begun: it goes on by itself, is made anew, or ends the run."""
        cause = error.args[0]
        said = f"the transactional producer {self._config['transactional.id']!r} cannot start: {cause.str()}"
        self._is_forbidden = cause.code() in _FORBIDDEN
        if self._is_forbidden:  # for the client an error for good; an operator may grant the right again
            self.trouble = f"{said.rstrip('.')}; grant Write on this transactional id, as forebay acls says"
            self._client, self._anew_at = None, self._now + self._next_pause()
        elif cause.retriable() or cause.code() == ck.KafkaError._TIMED_OUT:
            self.trouble = said  # the next call goes on with the same request
        else:
            raise KafkaFatalError(said) from error
