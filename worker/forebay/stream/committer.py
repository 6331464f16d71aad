"""Commits the low watermarks, one request at a time, and reads the answers. Never synchronous: that has no time-out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from forebay.records import Partition
from forebay.stream.consumer import Member
from forebay.stream.offsets import Offsets

_ANSWER_SECONDS = 30.0
_LEAST_GAP_SECONDS = 0.01

Answer = tuple[dict[Partition, int], dict[Partition, str]]


class Committing(Protocol):
    """How offsets get committed: by the consumer, or inside the outbox's transactions."""

    @property
    def is_settled(self) -> bool: ...
    def settle(self, now: float, *, idle: bool) -> list[Answer]: ...
    def leave(self, partitions: Iterable[Partition]) -> None: ...


class Committer:
    """Commits for one consumer; `interval` is the usual time between commits, in seconds."""

    def __init__(self, consumer: Member, offsets: Offsets, interval: float) -> None:
        self._consumer = consumer
        self._offsets = offsets
        self._interval = interval
        self._committed_at = 0.0

    def settle(self, now: float, *, idle: bool) -> list[Answer]:
        """Commit what is due, at once where the worker is idle; return the answers to earlier commits."""
        answers = self._answers()
        gap = now - self._committed_at
        if gap < _LEAST_GAP_SECONDS or (gap < self._interval and not idle):
            return answers
        if self._consumer.commits_in_flight:
            if gap < _ANSWER_SECONDS:
                return answers
            self._consumer.commits_in_flight = 0  # a coordinator that takes requests and never answers
        marks = self._offsets.committable()
        if marks:
            self._consumer.commit(marks)
            self._offsets.requested(marks)
            self._committed_at = now
        return answers

    @property
    def is_settled(self) -> bool:
        """Whether everything that may be committed is committed."""
        return not self._consumer.commits_in_flight and not self._consumer.commits and not self._offsets.committable()

    def leave(self, partitions: Iterable[Partition]) -> None:
        """Commit what is finished of partitions that are being revoked."""
        marks = self._offsets.committable(partitions)
        if marks:
            self._consumer.commit(marks)
            self._offsets.requested(marks)

    def _answers(self) -> list[Answer]:
        answers: list[Answer] = []
        while self._consumer.commits:
            marks, failed = self._consumer.commits.popleft()
            for partition, mark in marks.items():
                if partition in failed:
                    self._offsets.refused(partition)
                else:
                    self._offsets.committed(partition, mark)
            answers.append((marks, failed))
        return answers
