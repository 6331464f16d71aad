"""The consumer of the input topics. The loop's thread owns it: every call, and every callback, runs there.

An exception that leaves `poll` or `consume`, or a callback, destroys records that were fetched already while the
position moves on. So every callback is wrapped here, and what goes wrong becomes an `Event` that the loop reads.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import confluent_kafka as ck

from forebay.errors import ConfigError, KafkaFatalError
from forebay.records import Headers, Partition, Record
from forebay.stream.credentials import OneClient
from forebay.stream.leaders import are_well
from forebay.stream.member import Event, Listener
from forebay.stream.questions import Questions
from forebay.stream.starts import DEFAULT_RULE, StartRule, Starts
from forebay.stream.unreadable import SKIPPED, Unreadable

_NOT_FETCHED = {ck.KafkaError._STATE, ck.KafkaError._PREV_IN_PROGRESS}
"""What a seek meets in a partition that the client does not fetch yet, or not any more."""

_FORBIDDEN = ck.KafkaError(ck.KafkaError.GROUP_AUTHORIZATION_FAILED).str()
_NO_POSITION = -1001
_REWIND_SECONDS = 5.0


class Consumer(OneClient):
    """A group member that reads records and commits offsets; `start` subscribes."""

    def __init__(
        self,
        config: dict[str, Any],
        topics: Iterable[str],
        rule: StartRule = DEFAULT_RULE,
        logger: logging.Logger | None = None,
    ) -> None:
        self._config = config
        self._topics = list(topics)
        self._logger = logger or logging.getLogger("forebay.kafka")
        self._listener: Listener | None = None
        self._failed: BaseException | None = None
        self._assignment_changed = False
        self._held: set[Partition] = set()
        self._owned: set[Partition] = set()
        self.events: deque[Event] = deque()
        self._questions = Questions(self.events.append)
        self._starts = Starts(rule, config, self.events.append)
        self._unreadable = Unreadable()
        self.commits: deque[tuple[dict[Partition, int], dict[Partition, str]]] = deque()
        self.commits_in_flight = 0
        self.paused = False
        self._headers: Headers = []

    def start(self, listener: Listener) -> None:
        """Subscribe. Raises ConfigError where librdkafka refuses a property."""
        self._listener = listener
        self._join()

    def _join(self) -> None:
        config = {**self._config, "error_cb": self._on_error, "on_commit": self._on_commit}
        try:
            self._client = ck.Consumer(config, logger=self._logger)
        except ck.KafkaException as error:
            raise ConfigError(f"the Kafka client refuses the settings: {error.args[0].str()}") from error
        self._questions.client = self._starts.client = self._client
        self._client.subscribe(
            self._topics,
            on_assign=self._on_assign,
            on_revoke=self._wrapped(lambda listener: listener.revoked),
            on_lost=self._wrapped(lambda listener: listener.lost),
        )

    def _join_again(self) -> None:
        """Begin anew as a member without partitions: the client has come to its end, the worker has not."""
        listener, self._listener = self._listener, None
        lost, self._owned = list(self._owned), set()
        if listener is not None:
            listener.lost(lost)
        self._starts.forget(lost)
        self._client.close()
        self._listener, self.commits_in_flight = listener, 0
        self._held.clear()
        self._join()

    def receive(self, limit: int, wait: float) -> list[Record]:
        """Return at most `limit` records. Waits up to `wait` seconds for the first and not at all for the rest.

        `consume(n, t)` would wait out `t` to fill `n`. Raises KafkaFatalError when the client cannot go on, and
        NoStartError, after which it goes on with the other partitions, where one has no start.
        """
        client = self._client
        if self._assignment_changed:
            self._assignment_changed = False
            if self.paused:
                self._hold()
            else:
                self._let_go()
        if self._starts.astray:
            self._starts.find(time.monotonic())
        messages: list[Any] = []
        if wait > 0:
            first = client.poll(wait)
            if first is not None:
                messages.append(first)
                messages += client.consume(limit - 1, 0) if limit > 1 else ()
        else:
            messages = client.consume(limit, 0)
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        return self._records(messages)

    def pause(self) -> None:
        """Stop fetching. What the client had prefetched is thrown away and fetched again later."""
        self._hold()
        self.paused = True

    def resume(self) -> None:
        """Fetch again, from the position of the last record that `receive` returned."""
        self.paused = False
        self._let_go()

    def _hold(self) -> None:
        assignment = self._client.assignment()
        self._client.pause(assignment)
        self._held |= {Partition(p.topic, p.partition) for p in assignment}

    def _let_go(self) -> None:
        """Resume what was paused and is assigned: the client never fetches a partition that went paused and is back."""
        held = [p for p in self._client.assignment() if (p.topic, p.partition) in self._held]
        if held:
            self._client.resume(held)
            self._held -= {Partition(p.topic, p.partition) for p in held}

    def commit(self, marks: dict[Partition, int], notes: Mapping[Partition, str] | None = None) -> None:
        """Ask the broker to keep `marks`, with `notes` as their metadata; the answer comes in `commits` after a while.

        Never synchronous: a synchronous commit has no time-out.
        """
        said = notes or {}
        offsets = [ck.TopicPartition(*partition, mark, said.get(partition, "")) for partition, mark in marks.items()]
        try:
            self._client.commit(offsets=offsets, asynchronous=True)
        except ck.KafkaException as error:
            self.commits.append((marks, dict.fromkeys(marks, error.args[0].name())))
        else:
            self.commits_in_flight += 1

    def seek(self, partition: Partition, offset: int) -> None:
        """Move the position of an assigned partition."""
        self._unreadable.forget([partition])
        self._seek(partition, offset)

    def _seek(self, partition: Partition, offset: int) -> None:
        try:
            self._client.seek(ck.TopicPartition(*partition, offset))
            self._starts.sought(partition, offset)
        except ck.KafkaException as error:
            if error.args[0].code() not in _NOT_FETCHED:
                raise
            self._starts.go({partition: offset})

    def committed(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int | None] | None:
        """Ask the broker for the group's committed offsets, None where there is none; None if it does not answer."""
        return self._questions.committed(partitions, timeout)

    def offsets_at(self, times: Mapping[Partition, int], timeout: float) -> dict[Partition, int | None] | None:
        """Ask for the first offset at or after each time in ms, None where there is none; None without an answer."""
        return self._questions.offsets_at(times, timeout)

    def notes(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, tuple[int, str]]:
        """Ask the broker for committed offsets that have metadata, with it; none if it does not answer in time."""
        return self._questions.notes(partitions, timeout)

    def rewind(self, partitions: Iterable[Partition]) -> bool:
        """Move the positions of assigned partitions back to the group's committed offsets.

        Returns False, and moves nothing, where the group's coordinator does not say them.
        """
        committed = self.committed(partitions, _REWIND_SECONDS)
        if committed is None:
            return False
        for partition, offset in committed.items():
            self.seek(partition, self._starts.without_commit(partition) if offset is None else offset)
        return True

    def reaches(self, topics: Iterable[str], timeout: float) -> bool:
        """Whether the leaders of these topics are well; blocks for up to `timeout` seconds or so."""
        return are_well(self._client, topics, timeout)

    def group_metadata(self) -> Any:
        """Return the group membership that a transaction must name; fresh for each transaction."""
        return self._client.consumer_group_metadata()

    def end_offset(self, partition: Partition) -> int | None:
        """Return the end of a partition as the last fetch saw it, without asking; None if unknown."""
        try:
            high = self._client.get_watermark_offsets(ck.TopicPartition(*partition), cached=True)[1]
        except (ck.KafkaException, TypeError):
            return None
        return high if high >= 0 else None

    def close(self) -> None:
        """Leave the group. May wait for an unreachable broker: call it under a watchdog."""
        if self._client is not None:
            self._client.close()

    def _records(self, messages: list[Any]) -> list[Record]:
        records: list[Record] = []
        same, moved = self._headers, self._unreadable.moved
        moved.clear()
        for one in messages:
            if moved and (one.topic(), one.partition()) in moved:
                continue  # it comes again, behind what could not be read
            if one.error() is None:
                headers = one.headers()
                if headers == same:  # one list for all that are alike: less to free, and read once
                    headers = same
                else:
                    same = headers = headers or []
                at = one.timestamp()[1]
                records.append(Record(one.topic(), one.partition(), one.offset(), one.key(), one.value(), headers, at))
            elif (unreadable := self._error(one)) is not None:
                records.append(unreadable)
        self._headers = same
        return records

    def _error(self, message: Any) -> Record | None:
        """Turn an error event into an Event, or into a record without a value where it hides one.

        A lost right to the group is an error for good with the consumer protocol, with the classic one it is not.
        """
        error = message.error()
        topic, number, offset = message.topic(), message.partition(), message.offset()
        partition = Partition(topic, number) if topic is not None and number is not None and number >= 0 else None
        if error.code() == ck.KafkaError._FATAL and _FORBIDDEN in error.str():
            self.events.append(Event("GROUP_AUTHORIZATION_FAILED", _FORBIDDEN))
            self._join_again()
            return None
        if error.fatal() or error.code() == ck.KafkaError._FATAL:
            raise KafkaFatalError(f"the Kafka client cannot go on: {error.str()}")
        if error.code() == ck.KafkaError._AUTO_OFFSET_RESET and partition is not None:
            self._starts.astray[partition] = error.str()
            return None
        if error.code() in SKIPPED and partition is not None and offset is not None and offset >= 0:
            record = self._unreadable.pass_over(partition, offset, error.str())
            self._seek(partition, record.offset + 1)
            return record
        self.events.append(Event(error.name(), error.str(), partition, offset))
        return None

    def _on_assign(self, _: Any, places: list[Any]) -> None:
        if self._listener is None:
            return
        self._assignment_changed = True
        try:
            partitions = [Partition(p.topic, p.partition) for p in places]
            self._owned.update(partitions)
            self._unreadable.forget(partitions)
            with self._questions.assigning(partitions) as known:
                self._listener.assigned(partitions)
                self._client.incremental_assign(self._starts.begin(known))
        except BaseException as error:
            self._failed = error

    def _wrapped(self, pick: Callable[[Listener], Callable[[list[Partition]], None]]) -> Callable[..., None]:
        def callback(_: Any, partitions: list[Any]) -> None:
            if self._listener is None:
                return
            self._assignment_changed = True
            try:
                gone = [Partition(p.topic, p.partition) for p in partitions]
                self._owned.difference_update(gone)
                pick(self._listener)(gone)
                self._starts.forget(gone)
            except BaseException as error:
                self._failed = error

        return callback

    def _on_error(self, error: Any) -> None:
        self.events.append(Event(error.name(), error.str()))

    def _on_commit(self, error: Any, partitions: list[Any]) -> None:
        self.commits_in_flight = max(0, self.commits_in_flight - 1)
        marks = {Partition(p.topic, p.partition): p.offset for p in partitions if p.offset > _NO_POSITION}
        failed = {Partition(p.topic, p.partition): (p.error or error).name() for p in partitions if p.error or error}
        self.commits.append((marks, failed))
