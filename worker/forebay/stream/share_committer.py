"""Acknowledges in queue mode, where the others commit: what is answered is accepted, what is given back released.

An acknowledgement that comes too late, or that is lost, only means that the record is delivered and answered again.
"""

from __future__ import annotations

from collections.abc import Iterable

from forebay import failpoints
from forebay.records import Partition
from forebay.stream.committer import LEAST_GAP_SECONDS, Answer
from forebay.stream.share_consumer import ShareConsumer


class ShareCommitter:
    """Acknowledges for one member; `interval` is the usual time between two acknowledgements of a wave, in seconds."""

    def __init__(self, consumer: ShareConsumer, interval: float) -> None:
        self._consumer = consumer
        self._interval = interval
        self._sent_at = 0.0

    def settle(self, now: float, *, idle: bool) -> list[Answer]:
        """Acknowledge what is due, at once where the worker is idle; return the answers to earlier ones."""
        gap = now - self._sent_at
        send = gap >= LEAST_GAP_SECONDS and (idle or gap >= self._interval) and self._consumer.untold
        if send:
            failpoints.hit("before_commit")
            self._sent_at = now
        self._consumer.answer(send=send)
        answers = list(self._consumer.commits)
        self._consumer.commits.clear()
        for _ in answers:
            failpoints.hit("after_commit")
        return answers

    @property
    def is_settled(self) -> bool:
        """Whether everything that was decided is acknowledged."""
        return not self._consumer.untold and not self._consumer.commits_in_flight

    def recall(self, partitions: list[Partition]) -> None:
        """Do nothing: what is finished is acknowledged one by one."""

    def leave(self, partitions: Iterable[Partition]) -> None:
        """Acknowledge what is finished, at the end of a drain."""
        self._consumer.answer(send=True)
