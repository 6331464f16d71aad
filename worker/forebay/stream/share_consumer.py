"""The consumer of queue mode: a member of a share group (KIP-932). The loop's thread owns it.

The client returns no further record while one of its last poll is undecided, so that its slowest request would hold up
everything behind it. So there are a few clients, `Hand`s, each with one wave: while one is worked off, another fetches.
How many records a poll returns is only a wish (a producer's batch is never cut), so what is too much waits here and is
given back before its lock runs out. The client (a preview in confluent-kafka 2.16) cannot renew locks.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import confluent_kafka as ck

from forebay.errors import ConfigError, KafkaFatalError
from forebay.records import Partition, Record
from forebay.stream.codec import UNREADABLE
from forebay.stream.leases import Leased, Leases, Place, Verdict
from forebay.stream.member import Event, Listener
from forebay.stream.offsetless import Offsetless
from forebay.stream.share_hand import Hand
from forebay.stream.unreadable import SKIPPED

HANDS = 3
"""Clients of one member: one wave runs, one waits behind it, one is being fetched."""

_TAKE_UNTIL = 1 / 3
"""Of the lock: while a wave is older, no more is taken; and what one service of this long takes is the most held."""

_KEEP_UNTIL = 1 / 2
"""Of the lock: what has waited longer before it was read is given back, for somebody who is sooner."""

_REST = 0.005
"""Seconds of sleep where there is nothing to poll: every wave is being worked on."""

_NO_GROUP = {ck.KafkaError.GROUP_ID_NOT_FOUND, ck.KafkaError.INCONSISTENT_GROUP_PROTOCOL}
_NO_SHARING = {ck.KafkaError.UNSUPPORTED_VERSION, ck.KafkaError._UNSUPPORTED_FEATURE}


@dataclass(frozen=True, slots=True)
class Sharing:
    """On which terms the group lends records: for how many seconds, and how many times.

    `may_take` says whether the worker is fit to take records. One that cannot answer must not: each lock that runs out
    counts as a delivery, and after the last the broker drops the record.
    """

    lock_seconds: float
    delivery_limit: int
    may_take: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class Service:
    """How fast the replicas are by their warm-up: rows per second together, and the longest batch in seconds."""

    rows_per_second: float
    longest_seconds: float


class ShareConsumer(Offsetless):
    """A member of a share group. `most` is the size of the worker's queue; `service` is asked at the start."""

    def __init__(
        self,
        config: dict[str, Any],
        topics: Iterable[str],
        leases: Leases,
        terms: Sharing,
        *,
        most: int,
        service: Callable[[], Service | None] = lambda: None,
        make_client: Callable[..., Any] = ck.ShareConsumer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._topics = list(topics)
        self._leases = leases
        self._terms = terms
        self._most = most
        self._service = service
        self._make_client = make_client
        self._clock = clock
        self._listener: Listener | None = None
        self._waiting: deque[Leased] = deque()
        self._joined = False
        self.hands: list[Hand] = []
        self.wave_size = 1
        self.events: deque[Event] = deque()
        self.commits: deque[tuple[dict[Partition, int], dict[Partition, str]]] = deque()
        self.commits_in_flight = 0
        self.paused = False

    def start(self, listener: Listener) -> None:
        """Join. Raises ConfigError where librdkafka refuses a property, or where one batch is too long for a lock."""
        self._listener = listener
        self.wave_size = max(self._bounded(self._most) // HANDS, 1)
        config = {**self._config, "max.poll.records": self.wave_size, "error_cb": self._on_error}
        first = {"statistics.interval.ms": 500, "stats_cb": self._on_statistics}
        logger = logging.getLogger("forebay.kafka")
        try:
            for number in range(HANDS):
                client = self._make_client({**config, **({} if number else first)}, logger=logger)
                self.hands.append(Hand(client, self._on_answer))
                client.subscribe(self._topics)
        except (ck.KafkaException, ValueError) as error:
            said = error.args[0].str() if isinstance(error, ck.KafkaException) else error
            raise ConfigError(f"the Kafka client refuses the settings: {said}") from error

    def _bounded(self, most: int) -> int:
        """Return how many records may be held, so that they are finished well within their lock."""
        service, lock = self._service(), self._terms.lock_seconds
        if service is None:
            return most
        if service.longest_seconds > lock * _TAKE_UNTIL:
            raise ConfigError(
                f"delivery.share_group: by the warm-up one batch takes {service.longest_seconds:.1f} s, and the "
                f"group's locks last {lock:.0f} s, of which a batch may take a third: lower batch.max_batch_size, or "
                "raise share.record.lock.duration.ms of the group"
            )
        return max(min(most, int(service.rows_per_second * lock * _TAKE_UNTIL)), 1)

    def take_credentials(self, username: str, password: str) -> None:
        """Let every hand log in by these; no client is made after the start."""
        for hand in self.hands:
            hand.take_credentials(username, password)

    def receive(self, limit: int, wait: float) -> list[Record]:
        """Return at most `limit` records; waits up to `wait` seconds for the first.

        Raises KafkaFatalError when the client cannot go on, ConfigError where the group is of another kind.
        """
        now = self._clock()
        self._give_back_late(now)
        if not self._waiting:
            self._ask(wait, takes=not self.paused and self._takes(limit, now))
        if self._joined and self._listener is not None:
            self._listener.assigned([])
            self._listener = None
        waiting = self._waiting
        return [waiting.popleft() for _ in range(min(limit, len(waiting)))] if waiting else []

    def _takes(self, limit: int, now: float) -> bool:
        oldest = self._leases.oldest()
        if oldest is None:
            return limit > 0 and self._terms.may_take()
        is_late = now - oldest > self._terms.lock_seconds * _TAKE_UNTIL
        return limit * 2 > self.wave_size and not is_late and self._terms.may_take()

    def _ask(self, wait: float, *, takes: bool) -> None:
        """Poll the hand that is asking, or let a free one ask. One that asks is polled whatever happens.

        It goes on fetching by itself until something comes, and what came is locked whether it is polled or not.
        """
        hand = next((hand for hand in self.hands if hand.asking), None)
        if hand is None and takes:
            hand = next((hand for hand in self.hands if hand.wave is None), None)
        if hand is not None and (self._poll(hand, wait if takes else 0.0) or takes):
            return
        if wait > 0:
            time.sleep(min(wait, _REST))

    def _poll(self, hand: Hand, wait: float) -> bool:
        """Poll a hand; whether a wave came."""
        try:
            since, messages = hand.poll(wait, self._clock())
        except ck.KafkaException as error:
            self._failed(error.args[0])
            return False
        if not messages:
            return False
        wave = hand.wave = self._leases.begin(since)
        for message in messages:
            place = (message.topic(), message.partition(), message.offset())
            if (record := self._record(message, place)) is not None:
                record.epoch = wave.number
                wave.left.add(place)
                self._waiting.append(record)
            elif place[0] is not None:
                wave.verdicts.append((place, Verdict.RELEASE))
        return True

    def _record(self, message: Any, place: Place) -> Leased | None:
        """Turn a message into a record; an error event into an Event, or into a record without a value."""
        error = message.error()
        count = message.delivery_count() or 1
        counted = (0, count, count >= self._terms.delivery_limit)
        if error is None:
            headers = message.headers() or []
            return Leased(*place, message.key(), message.value(), headers, message.timestamp()[1], *counted)
        has_place = place[0] is not None and (place[2] or -1) >= 0
        if error.code() in SKIPPED and has_place:
            return Leased(*place, None, None, [(UNREADABLE, error.str().encode())], 0, *counted)
        self._failed(error, Partition(place[0], place[1]) if has_place else None)
        return None

    def _failed(self, error: Any, partition: Partition | None = None) -> None:
        """Note an error of the client. Raises where it cannot go on."""
        if error.code() in _NO_GROUP:
            raise ConfigError(
                f"the group {self._config['group.id']} is no share group ({error.str()}): with delivery.share_group "
                "choose a kafka.group_id that no consumer group uses"
            )
        if error.code() in _NO_SHARING:
            raise ConfigError(
                f"delivery.share_group: this Kafka has no share groups ({error.str()}); they need Apache Kafka 4.2 "
                "with the feature share.version at 1"
            )
        if error.fatal() or error.code() == ck.KafkaError._FATAL:
            raise KafkaFatalError(f"the Kafka client cannot go on: {error.str()}")
        self.events.append(Event(error.name(), error.str(), partition))

    def _give_back_late(self, now: float) -> None:
        """Give back what has waited here for half of its lock."""
        oldest = self._leases.oldest() if self._waiting else None
        if oldest is None or now - oldest <= self._terms.lock_seconds * _KEEP_UNTIL:
            return
        late: list[Leased] = []
        kept: deque[Leased] = deque()
        waves = {hand.wave.number: hand.wave.since for hand in self.hands if hand.wave is not None}
        for record in self._waiting:
            is_late = now - waves.get(record.epoch, now) > self._terms.lock_seconds * _KEEP_UNTIL
            (late if is_late else kept).append(record)
        self._waiting = kept
        for record in late:
            self._leases.release(record)
        if late:
            told = f"{len(late)} records were given back unread: they had waited for half of their lock"
            self.events.append(Event("FOREBAY_LOCK_RUNS_OUT", told))

    def answer(self, *, send: bool) -> None:
        """Tell the clients what was decided; `send` sends it now, otherwise it goes along with the next fetch."""
        now = self._clock()
        for hand in self.hands:
            hand.settle(now, send=send)
            if hand.wave is not None and hand.wave.is_over:
                self._leases.end(hand.wave)
                hand.wave = None
        self.commits_in_flight = sum(hand.unanswered for hand in self.hands)

    @property
    def untold(self) -> bool:
        """Whether something was decided that the broker was not told."""
        return any(hand.untold for hand in self.hands)

    def pause(self) -> None:
        """Take no more records."""
        self.paused = True

    def resume(self) -> None:
        """Take records again."""
        self.paused = False

    def close(self) -> None:
        """Give everything back that is not answered, and leave. May wait for an unreachable broker."""
        for hand in self.hands:
            hand.give_back()
            hand.close()

    def _on_answer(self, failed: dict[Partition, str]) -> None:
        self.commits.append(({}, failed))

    def _on_error(self, error: Any) -> None:
        self.events.append(Event(error.name(), error.str()))

    def _on_statistics(self, text: str) -> None:
        """Learn that partitions were assigned: the client of a share group tells it in no other way."""
        if not self._joined:
            self._joined = json.loads(text).get("cgrp", {}).get("assignment_size", 0) > 0
