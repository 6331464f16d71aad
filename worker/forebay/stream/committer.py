"""Commits the low watermarks, one request at a time, and reads the answers. Never synchronous: that has no time-out.

What is finished ahead of a watermark travels in the commit's metadata, so that the next owner does not repeat it, and
so do the requests under suspicion, so that it runs them alone and goes on counting.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from forebay import failpoints
from forebay.records import Partition
from forebay.stream.member import Member
from forebay.stream.offsets import Offsets

_ANSWER_SECONDS = 30.0
LEAST_GAP_SECONDS = 0.01
RECALL_SECONDS = 3.0
_TOO_LONG = "OFFSET_METADATA_TOO_LARGE"

Answer = tuple[dict[Partition, int], dict[Partition, str]]


class Committing(Protocol):
    """How offsets get committed: by the consumer, or inside the outbox's transactions."""

    @property
    def is_settled(self) -> bool: ...
    def settle(self, now: float, *, idle: bool) -> list[Answer]: ...
    def recall(self, partitions: list[Partition]) -> None: ...
    def leave(self, partitions: Iterable[Partition]) -> None: ...


class Committer:
    """Commits for one consumer; `interval` is the usual time between commits, in seconds.

    `remembers` carries what is finished ahead of the watermarks over to the next owner. Not where results keep an
    order: the next owner would send those behind before those that are missing.
    """

    def __init__(self, consumer: Member, offsets: Offsets, interval: float, *, remembers: bool = True) -> None:
        self._consumer = consumer
        self._offsets = offsets
        self._interval = interval
        offsets.remembers = remembers
        self._says_anything = True
        self._committed_at = 0.0

    def settle(self, now: float, *, idle: bool) -> list[Answer]:
        """Commit what is due, at once where the worker is idle; return the answers to earlier commits."""
        answers = self._answers()
        gap = now - self._committed_at
        if gap < LEAST_GAP_SECONDS or (gap < self._interval and not idle):
            return answers
        if self._consumer.commits_in_flight:
            if gap < _ANSWER_SECONDS:
                return answers
            self._consumer.commits_in_flight = 0  # a coordinator that takes requests and never answers
        marks = self._offsets.committable(with_news=self._says_anything and gap >= self._interval)
        if marks:
            failpoints.hit("before_commit")
            self._commit(marks)
            self._committed_at = now
        return answers

    @property
    def is_settled(self) -> bool:
        """Whether everything that may be committed is committed."""
        if self._consumer.commits_in_flight or self._consumer.commits or self._offsets.committable():
            return False
        return not (self._says_anything and self._offsets.has_suspect_news)

    def leave(self, partitions: Iterable[Partition]) -> None:
        """Commit what is finished of partitions that are being revoked."""
        failpoints.hit("during_revoke")
        marks = self._offsets.committable(partitions, with_news=self._says_anything)
        if marks:
            self._commit(marks)

    def recall(self, partitions: list[Partition]) -> None:
        """Take over what earlier owners of newly assigned partitions said beside their commits."""
        if self._says_anything and partitions:
            for partition, (base, note) in self._consumer.notes(partitions, RECALL_SECONDS).items():
                self._offsets.recall(partition, base, note)

    def _commit(self, marks: dict[Partition, int]) -> None:
        self._consumer.commit(marks, self._offsets.notes(marks) if self._says_anything else {})
        self._offsets.requested(marks)

    def _says_less(self) -> None:
        """Leave out what is finished ahead, and, where even that is too long for this broker, everything."""
        self._says_anything = self._says_anything and self._offsets.remembers
        self._offsets.remembers = False

    def _answers(self) -> list[Answer]:
        answers: list[Answer] = []
        while self._consumer.commits:
            marks, failed = self._consumer.commits.popleft()
            for partition, mark in marks.items():
                if partition in failed:
                    self._offsets.refused(partition)
                    if failed[partition] == _TOO_LONG:
                        self._says_less()
                else:
                    self._offsets.committed(partition, mark)
            answers.append((marks, failed))
            failpoints.hit("after_commit")
        return answers
