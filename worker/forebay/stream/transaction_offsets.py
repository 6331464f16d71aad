"""The offsets of exactly-once mode: the committer that leaves them to the transactions of the outbox.

Outcomes leave in order there, so nothing is finished ahead of a committed offset; but a transaction's offsets say in
their metadata which requests are under suspicion, and a transaction of offsets alone says it while no outcome is due.
"""

from __future__ import annotations

from collections.abc import Iterable

import confluent_kafka as ck

from forebay import failpoints
from forebay.records import Partition
from forebay.stream.committer import RECALL_SECONDS, Answer
from forebay.stream.member import Member
from forebay.stream.offsets import Offsets
from forebay.stream.transactions import TransactionalOutbox


class TransactionalCommitter:
    """The offsets of exactly-once mode: they were committed with their outcomes, but for what the consumer skipped."""

    def __init__(self, outbox: TransactionalOutbox, offsets: Offsets, interval: float, consumer: Member) -> None:
        self._outbox = outbox
        self._offsets = offsets
        self._consumer = consumer
        offsets.remembers = False
        outbox.notes = offsets.notes
        self._interval = interval
        self._committed_at = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether everything that may be committed is committed."""
        return not (self._outbox.unacknowledged or self._offsets.committable() or self._offsets.has_suspect_news)

    def settle(self, now: float, *, idle: bool) -> list[Answer]:
        """Take over what transactions have committed; commit what lies behind the last outcome when all is idle."""
        answers: list[Answer] = []
        marks = self._outbox.take_committed()
        if marks:
            self._note(marks)
            answers.append((marks, {}))
        if not self._outbox.unacknowledged and now - self._committed_at >= self._interval and self._outbox.is_ready:
            behind = self._offsets.committable(with_news=True) if idle or self._offsets.has_suspect_news else {}
            if behind:
                answers.append(self._commit(behind, now))
        return answers

    def recall(self, partitions: list[Partition]) -> None:
        """Take over which requests of newly assigned partitions earlier owners held under suspicion."""
        if partitions:
            for partition, (base, note) in self._consumer.notes(partitions, RECALL_SECONDS).items():
                self._offsets.recall(partition, base, note)

    def leave(self, partitions: Iterable[Partition]) -> None:
        """Say who is under suspicion: what is finished was committed with its outcomes."""
        failpoints.hit("during_revoke")
        if self._offsets.has_suspect_news and not self._outbox.unacknowledged and self._outbox.is_ready:
            behind = self._offsets.committable(partitions, with_news=True)
            if behind:
                self._commit(behind, self._committed_at)

    def _commit(self, behind: dict[Partition, int], now: float) -> Answer:
        """Commit offsets without outcomes."""
        self._committed_at = now
        said = self._offsets.notes(behind)
        try:
            self._outbox.commit(behind, said)
        except ck.KafkaException as error:
            self._outbox.failed(error, now)
            return behind, dict.fromkeys(behind, error.args[0].name())
        self._note(behind)
        return behind, {}

    def _note(self, marks: dict[Partition, int]) -> None:
        self._offsets.requested(marks)
        for partition, mark in marks.items():
            self._offsets.committed(partition, mark)
