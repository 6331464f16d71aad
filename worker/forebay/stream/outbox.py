"""The outbox: sends outcomes and dead letters, and says which outcomes are acknowledged, so that their positions
may be closed.

What fails for want of a broker, a topic or a right is sent again with growing pauses, for as long as it takes: the
worker is then not ready and commits nothing above it, and where results keep an order the later ones wait behind it.
What is too large is replaced, never retried for ever. The loop's thread owns it; delivery reports arrive in `serve`.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from itertools import count
from typing import Any, Literal, Protocol

import confluent_kafka as ck

from forebay.errors import ConfigError, KafkaFatalError
from forebay.records import Headers, Outcome, Partition, Record
from forebay.stream.credentials import OneClient
from forebay.stream.holdback import Holdback
from forebay.stream.lines import Lines, has_letter
from forebay.stream.results import Encoder
from forebay.stream.verdicts import NO_SUCH_PARTITION, NO_SUCH_TOPIC, TOO_LARGE

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
_TRIES_TOO_LARGE = 3
_SPREAD = 0.01
"""Seconds between the results of a refused batch, so that each travels in a batch of its own."""


class Outgoing(Protocol):
    """How outcomes leave: acknowledged one by one here, or in transactions."""

    limits: dict[str, int]
    topics: tuple[str, ...]
    unacknowledged: int
    dead_letters: list[str]
    settled_in: list[float]
    trouble: str | None
    must_rewind: bool
    keeps: Callable[[Record], bool]

    @property
    def is_refused(self) -> bool: ...
    def start(self, logger: logging.Logger | None = None) -> None: ...
    def send(self, outcome: Outcome, now: float) -> None: ...
    def serve(self, now: float, wait: float = 0.0) -> list[Outcome]: ...
    def forget(self, partitions: Iterable[Partition]) -> list[Outcome]: ...
    def close(self) -> None: ...


class Outbox(OneClient):
    """Sends outcomes at least once, each time in the order in which they come where `ordering` asks for that.

    `limits` maps topics to their largest message in bytes, where it is known.
    """

    def __init__(
        self,
        config: dict[str, Any],
        encoder: Encoder,
        dead_letter_topic: str,
        make_client: Callable[..., Any] = ck.Producer,
        ordering: Literal["none", "partition", "key"] = "none",
    ) -> None:
        self._config = config
        self._make_client = make_client
        self._encoder = encoder
        self._dead_letter_topic = dead_letter_topic
        self._lines = Lines(ordering)
        self._holdback = Holdback()
        self._heard = False
        self._retries: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = count()
        self._pause = _FIRST_PAUSE
        self._grow_at = 0.0
        self._now = 0.0
        self._fatal: str | None = None
        self.limits: dict[str, int] = {}
        self.topics: tuple[str, ...] = (encoder.output_topic, dead_letter_topic)
        self.unacknowledged = 0
        self.closed: list[Outcome] = []
        self.dead_letters: list[str] = []
        self.settled_in: list[float] = []
        self.trouble: str | None = None
        self.must_rewind = False
        self.keeps: Callable[[Record], bool] = lambda record: True  # still this worker's; asked where it is refused

    def start(self, logger: logging.Logger | None = None) -> None:
        """Make the producer. Raises ConfigError where librdkafka refuses a property."""
        config = {**self._config, "error_cb": self._on_error}
        if self.limits:
            config["batch.size"] = max(min(1_000_000, *self.limits.values()) * 9 // 10, 1_024)
        try:
            self._client = self._make_client(config, logger=logger or logging.getLogger("forebay.kafka"))
        except ck.KafkaException as error:
            raise ConfigError(f"the Kafka client refuses the settings: {error.args[0].str()}") from error

    def send(self, outcome: Outcome, now: float) -> None:
        """Send an outcome, and its dead letter if it has one."""
        self._now = now
        self.unacknowledged += 1
        if self._holdback.is_on:
            self._holdback.take(outcome)
        else:
            self._hand_over(outcome)

    def _hand_over(self, outcome: Outcome) -> None:
        outcome.pending = 1
        if outcome.failure is not None:
            headers = self._encoder.dead_letter(outcome)
            if headers is not None:
                outcome.pending = 2
                self._produce_dead_letter(outcome, headers, outcome.record.value)
        if not (self._lines.held and self._lines.holds(outcome)):
            self._produce(outcome)

    def serve(self, now: float, wait: float = 0.0) -> list[Outcome]:
        """Handle delivery reports and due retries; return the outcomes that are acknowledged whole since last time."""
        self._now = now
        self._client.poll(wait)
        while self._retries and self._retries[0][0] <= now:
            heapq.heappop(self._retries)[2]()
        if self._fatal is not None:
            raise KafkaFatalError(f"the producer cannot go on: {self._fatal}")
        for outcome in self._holdback.due(now, len(self._client), heard=self._heard):
            self._hand_over(outcome)
        self._heard = False
        if not self._retries:
            self.trouble = self._holdback.trouble
        closed, self.closed = self.closed, []
        if closed:
            self._pause = _FIRST_PAUSE
            self.unacknowledged -= len(closed)
        return closed

    @property
    def is_refused(self) -> bool:
        """Whether brokers have refused something that is sent again: so they have answered."""
        return bool(self._retries)

    def forget(self, partitions: Iterable[Partition]) -> list[Outcome]:
        """Drop what waits behind a refused outcome or for silent brokers: the next owner of the partitions sends it.

        What the client has cannot be called back, and is acknowledged some time: an idempotent producer whose queue was
        purged while brokers were gone never sent anything again, in most of the outages that were tried.
        """
        given = set(partitions)
        dropped = self._lines.forget(given) + self._holdback.forget(given)
        self.unacknowledged -= len(dropped)
        return dropped

    def close(self) -> None:
        """Give up what is not acknowledged and drop the producer."""
        if self._client is not None:
            self._client.purge()
            self._client = None

    def _produce(self, outcome: Outcome, tries: int = 0) -> None:
        limit = self.limits.get(outcome.topic)
        if limit is not None and len(outcome.value) > limit - 1024 and outcome.failure is None:
            self._replace_too_large(outcome, limit)
            return
        try:
            self._client.produce(
                outcome.topic,
                outcome.value,
                outcome.id.encode(),
                -1 if outcome.partition is None else outcome.partition,
                partial(self._delivered, outcome, tries),
                headers=outcome.headers,
            )
        except BufferError:
            self._later(outcome, tries, "the producer's queue is full", 0.005)
        except ck.KafkaException as error:
            self._refused(outcome, tries, error.args[0])

    def _delivered(self, outcome: Outcome, tries: int, error: Any, message: Any) -> None:
        self._heard = True
        if error is not None:
            self._refused(outcome, tries, error)
            return
        outcome.pending -= 1
        if not outcome.pending:
            self.closed.append(outcome)
        self._let_follow(outcome)

    def _let_follow(self, outcome: Outcome) -> None:
        """Send what waited behind an outcome that is out of the way."""
        if self._lines.held:
            for following, before in self._lines.acknowledged(outcome):
                self._produce(following, before)

    def _refused(self, outcome: Outcome, tries: int, error: Any) -> None:
        if error.fatal() or error.code() == ck.KafkaError._FATAL:
            self._fatal = error.str()
        elif error.code() in TOO_LARGE and tries >= _TRIES_TOO_LARGE - 1 and outcome.failure is None:
            self._replace_too_large(outcome, None)
        elif error.code() in NO_SUCH_TOPIC and outcome.topic != self._encoder.output_topic:
            self._turn_back(outcome, error.str())
        elif error.code() in NO_SUCH_PARTITION and outcome.partition is not None:
            outcome.partition = None  # there is no such reply partition: any of the topic is better than none
            self._produce(outcome)
        elif error.code() in TOO_LARGE:
            # A topic that takes less than a producer's batch refuses whole batches: alone the result may fit.
            self._later(outcome, tries + 1, "a batch is too large", _SPREAD * (len(self._retries) + 1), alone=True)
        elif error.code() != ck.KafkaError._PURGE_QUEUE:
            self._later(outcome, tries + 1, f"{outcome.topic}: {error.str()}")

    def _later(
        self, outcome: Outcome, tries: int, trouble: str, pause: float | None = None, *, alone: bool = False
    ) -> None:
        """Send an outcome again after a pause, in its place in its line; not one that the next owner sends."""
        if not has_letter(outcome) and not self.keeps(outcome.record):
            self.unacknowledged -= 1
            self._let_follow(outcome)
            return
        line = self._lines.refused(outcome, tries, alone=alone)
        if line is not None:
            self._again(partial(self._resume, line), trouble, pause)

    def _resume(self, line: Hashable) -> None:
        due, is_early = self._lines.resume(line)
        for outcome, tries in due:
            self._produce(outcome, tries)
        if is_early:
            self._again(partial(self._resume, line), "", _SPREAD)

    def _replace_too_large(self, outcome: Outcome, limit: int | None) -> None:
        """Put an error in the place of a result that the topic does not take."""
        size = len(outcome.value)
        message = f"the result has {size} bytes, more than {outcome.topic} takes"
        self._replace(outcome, self._encoder.too_large(outcome, message + (f" ({limit})" if limit else "")))

    def _turn_back(self, outcome: Outcome, why: str) -> None:
        """Send what a reply topic cannot take to the output topic: a caller named it, it must hold up nobody else."""
        if outcome.failure is None:
            self._replace(outcome, self._encoder.turned_back(outcome, why))
            return
        outcome.topic, outcome.partition = self._encoder.output_topic, None
        self._produce(outcome)

    def _replace(self, outcome: Outcome, error: Outcome) -> None:
        """Send an error in the place of a result, with its dead letter."""
        assert error.failure is not None
        outcome.value, outcome.headers, outcome.failure = error.value, error.headers, error.failure
        outcome.topic, outcome.partition = error.topic, error.partition
        headers = self._encoder.dead_letter(outcome)
        if headers is not None:
            outcome.pending += 1
            self._produce_dead_letter(outcome, headers, outcome.record.value)
        self._produce(outcome)

    def _produce_dead_letter(self, outcome: Outcome, headers: Headers, value: bytes | None, tries: int = 0) -> None:
        again = partial(self._produce_dead_letter, outcome, headers, value)
        try:
            self._client.produce(
                self._dead_letter_topic,
                value,
                outcome.record.key,
                on_delivery=partial(self._dead_letter_delivered, outcome, again, tries),
                headers=headers,
            )
        except BufferError:
            self._again(partial(again, tries), "the producer's queue is full", 0.005)
        except ck.KafkaException as error:
            self._dead_letter_delivered(outcome, again, tries, error.args[0], None)

    def _dead_letter_delivered(
        self, outcome: Outcome, again: Callable[[int], None], tries: int, error: Any, message: Any
    ) -> None:
        self._heard = True
        if error is None:
            assert outcome.failure is not None
            self.dead_letters.append(outcome.failure.code)
            outcome.pending -= 1
            if not outcome.pending:
                self.closed.append(outcome)
        elif error.code() in TOO_LARGE and tries >= _TRIES_TOO_LARGE - 1:
            headers = self._encoder.dead_letter(outcome) or []
            own = [pair for pair in headers if pair[0].startswith(("kafka_dlt-", "forebay-"))]
            self._produce_dead_letter(outcome, [*own, ("forebay-value-left-out", b"too large for this topic")], None)
        elif error.code() != ck.KafkaError._PURGE_QUEUE:
            self._again(partial(again, tries + 1), f"{self._dead_letter_topic}: {error.str()}")

    def _again(self, call: Callable[[], None], trouble: str, pause: float | None = None) -> None:
        if pause is None:
            self.trouble = trouble
            if self._now >= self._grow_at:  # once for all that one answer of a broker has refused
                self._pause = min(self._pause * 1.5, _LONGEST_PAUSE)
                self._grow_at = self._now + self._pause
            pause = self._pause
        heapq.heappush(self._retries, (self._now + pause, next(self._sequence), call))

    def _on_error(self, error: Any) -> None:
        if error.fatal():
            self._fatal = error.str()
