"""The offsets of exactly-once mode: the committer that leaves them to the transactions of the outbox."""

from __future__ import annotations

from collections.abc import Iterable

import confluent_kafka as ck

from forebay import failpoints
from forebay.records import Partition
from forebay.stream.committer import Answer
from forebay.stream.offsets import Offsets
from forebay.stream.transactions import TransactionalOutbox


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

    def recall(self, partitions: list[Partition]) -> None:
        """Do nothing: outcomes leave in order, so nothing is finished ahead of the committed offset."""

    def leave(self, partitions: Iterable[Partition]) -> None:
        """Do nothing: what is finished was committed with its outcomes."""
        failpoints.hit("during_revoke")

    def _note(self, marks: dict[Partition, int]) -> None:
        self._offsets.requested(marks)
        for partition, mark in marks.items():
            self._offsets.committed(partition, mark)
