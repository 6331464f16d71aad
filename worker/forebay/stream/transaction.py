"""One transaction: outcomes and dead letters, the offsets while these are on their way, then its commit.

It runs on a thread beside the loop's. All that it needs it was given: where it is given up, it goes on by itself with
its own client, which is fenced by then.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import Any

import confluent_kafka as ck

from forebay import failpoints
from forebay.records import Outcome
from forebay.stream.refusals import Refusals, Report
from forebay.stream.results import Encoder


@dataclass(frozen=True, slots=True)
class Terms:
    """What the transactions of an outbox have in common; a call of the client may take `seconds`."""

    encoder: Encoder
    dead_letter_topic: str
    refusals: Refusals
    seconds: float

    def has_dead_letter(self, outcome: Outcome) -> bool:
        """Whether a dead letter goes with the outcome."""
        return outcome.failure is not None and self.encoder.dead_letter(outcome) is not None


_MOST_OUTCOMES = 10_000
_LESS = 4


class Portion:
    """How many outcomes a transaction takes: fewer after one that was overdue, more again after those that are quick.

    What a quota or a slow link lets through in `seconds` would otherwise be tried again for ever, as large as before.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._too_many = 2 * _MOST_OUTCOMES
        self.outcomes = _MOST_OUTCOMES

    def ended(self, took: float) -> None:
        """Take in that a transaction took so many seconds. Where it went wrong before more are added with care."""
        if took < self._seconds / _LESS:
            more = self.outcomes * 2 if self.outcomes * 2 < self._too_many else self.outcomes + 1 + self._too_many // 16
            self.outcomes = min(more, _MOST_OUTCOMES)

    def overdue(self, tried: int) -> None:
        """Take in that one with so many outcomes took too long."""
        self._too_many = min(tried, self.outcomes)
        self.outcomes = max(self._too_many // _LESS, 1)


@dataclass(slots=True)
class Transaction:
    """What one transaction commits: outcomes, and offsets with the `member` of the group whose they are."""

    client: Any
    outcomes: list[Outcome]
    offsets: list[Any]
    member: Any
    terms: Terms
    reports: list[Report] = field(default_factory=list)
    """What brokers have refused of it."""

    def run(self) -> float:
        """Begin it, fill it and commit it; return when that was done. Raises KafkaException."""
        client, seconds = self.client, self.terms.seconds
        client.begin_transaction()
        failpoints.hit("in_transaction")
        for outcome in self.outcomes:
            self._produce(outcome)
        failpoints.hit("before_transaction_offsets")
        client.send_offsets_to_transaction(self.offsets, self.member, seconds)
        failpoints.hit("before_transaction_commit")
        client.commit_transaction(seconds)
        failpoints.hit("after_transaction_commit")
        return time.perf_counter()

    def _produce(self, outcome: Outcome) -> None:
        key, partition = outcome.id.encode(), -1 if outcome.partition is None else outcome.partition
        self._queue(outcome, outcome.topic, outcome.value, key, partition, outcome.headers)
        if self.terms.has_dead_letter(outcome):
            headers, value = self.terms.encoder.dead_letter(outcome), outcome.record.value
            if not self.terms.refusals.takes_letter(outcome):
                own = [pair for pair in headers or () if pair[0].startswith(("kafka_dlt-", "forebay-"))]
                headers, value = [*own, ("forebay-value-left-out", b"too large for this topic")], None
            self._queue(outcome, self.terms.dead_letter_topic, value, outcome.record.key, -1, headers)

    def _queue(self, outcome: Outcome, topic: str, value: Any, key: Any, partition: int, headers: Any) -> None:
        report = functools.partial(self._reported, outcome, topic)
        while True:
            try:
                self.client.produce(topic, value, key, partition, report, headers=headers)
                return
            except BufferError:
                self.client.poll(0.05)
            except ck.KafkaException as error:
                report(error.args[0], None)
                raise

    def _reported(self, outcome: Outcome, topic: str, error: Any, message: Any) -> None:
        """Take a delivery report."""
        if error is not None:
            is_letter = topic == self.terms.dead_letter_topic and topic != outcome.topic
            self.terms.refusals.report(self.reports, outcome, is_letter, error)
