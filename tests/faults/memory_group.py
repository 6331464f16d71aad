"""A group of real workers on an in-memory Kafka: what a seeded run is made of. `simulation` drives it.

Everything happens on one thread and on a clock of its own, so a seed tells a run whole. Kafka is a double, which
refuses what a real one refuses (commits and transactions of a member that the group has expelled), the replicas are
scripted, and the metrics count without Prometheus; the worker between them is the real one. No torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import confluent_kafka as ck

from forebay.assembly import assemble
from forebay.health import Health
from forebay.records import Headers, Partition
from forebay.settings import Settings
from forebay.stream.client_config import producer_config
from forebay.stream.committer import Committer
from forebay.stream.member import Listener
from forebay.stream.outbox import Outbox
from forebay.stream.transaction_offsets import TransactionalCommitter
from forebay.stream.transactions import TransactionalOutbox
from forebay.testing import ManualClock, MemoryBroker, MemoryConsumer, MemoryProducer, memory_settings
from forebay.worker import Worker
from tests.faults.history import Place, Position, Sample

PARTITIONS = [Partition("requests", number) for number in range(3)]


class Broker(MemoryBroker):
    """Notes what is committed when, which records belong to no committed transaction, and whom the group expelled."""

    def __init__(self) -> None:
        super().__init__({"requests": len(PARTITIONS), "results": 2, "dead": 1})
        self.samples: list[Sample] = []
        self.invisible: set[Position] = set()
        self.expelled: set[object] = set()
        self.open: dict[str, Transactions] = {}

    def sample(self) -> None:
        """Note what is committed now, and how long the logs are."""
        self.samples.append(
            Sample({(t, p): mark for (t, p), mark in self.committed.items()}, self.ends("results", "dead"))
        )

    def ends(self, *topics: str) -> dict[Place, int]:
        """Return the ends of these topics' partitions."""
        return {(topic, n): len(log) for topic in topics for n, log in enumerate(self.topics[topic].partitions)}


class GroupConsumer(MemoryConsumer):
    """A member that is told its partitions by the run, and whose commits are refused while it is expelled."""

    _broker: Broker

    def start(self, listener: Listener) -> None:
        """Join with nothing: the run assigns."""
        self._listener = listener

    @property
    def owned(self) -> list[Partition]:
        """The partitions that it reads, or will with its next turn."""
        coming = [place for kind, places in self._changes if kind == "assigned" for place in places]
        return list(dict.fromkeys([*self._positions, *coming]))

    def commit(self, marks: dict[Partition, int], notes: Mapping[Partition, str] | None = None) -> None:
        """Commit unless the group has expelled this member."""
        if self in self._broker.expelled:
            self._broker.fail_commits.appendleft(ck.KafkaError.UNKNOWN_MEMBER_ID)
        super().commit(marks, notes)
        self._broker.sample()

    def group_metadata(self) -> GroupConsumer:
        """Return who asks."""
        return self


class ForgetfulProducer(MemoryProducer):
    """A producer whose acknowledgements may get lost: the record is in the log, and it is told that it is not.

    `forget` does so to the next `times` records of a topic; `lost` is called with each of them.
    """

    def __init__(self, broker: Broker, lost: Callable[[Headers], None]) -> None:
        super().__init__(broker)
        self._lost = lost
        self._times: dict[str, int] = {}

    def forget(self, topic: str, times: int) -> None:
        """Lose the acknowledgements of the next records."""
        self._times[topic] = self._times.get(topic, 0) + times

    def produce(self, topic: str, *rest: Any, headers: Headers, **named: Any) -> None:
        """Append a record."""
        super().produce(topic, *rest, headers=headers, **named)
        if self._times.get(topic) and self._reports and self._reports[-1][1] is None:
            self._times[topic] -= 1
            self._reports[-1] = (self._reports[-1][0], ck.KafkaError(ck.KafkaError._MSG_TIMED_OUT))
            self._lost(headers)


class Transactions(MemoryProducer):
    """A transactional producer. Its member's `endings` say how the next commits end: "lost", "unknown", "refused"."""

    _broker: Broker

    def __init__(self, broker: Broker, name: str, member: Member) -> None:
        super().__init__(broker)
        self._name = name
        self._member = member
        self._written: list[Position] = []
        self._offsets: dict[Partition, int] = {}
        self._notes: dict[Partition, str] = {}

    def init_transactions(self, timeout: float) -> None:
        """Abort what an earlier producer of this name has left open, and fence it."""
        older = self._broker.open.get(self._name)
        if older is not None and older is not self:
            older.abort_transaction(timeout)
        self._broker.open[self._name] = self

    def begin_transaction(self) -> None:
        """Begin."""
        self._check()

    def produce(self, topic: str, *rest: Any, **named: Any) -> None:
        """Append a record that nobody sees before the commit."""
        before = self._broker.ends(topic) if topic in self._broker.topics else {}
        super().produce(topic, *rest, **named)
        for place, end in (self._broker.ends(topic) if before else {}).items():
            if end > before[place]:
                self._written.append((*place, end - 1))
                self._broker.invisible.add((*place, end - 1))

    def send_offsets_to_transaction(self, offsets: list[Any], member: GroupConsumer, timeout: float) -> None:
        """Take the offsets, unless the member is expelled."""
        self._check()
        if member in self._broker.expelled:
            raise _abortable(ck.KafkaError.UNKNOWN_MEMBER_ID)
        self._offsets |= {Partition(p.topic, p.partition): p.offset for p in offsets}
        self._notes |= {Partition(p.topic, p.partition): p.metadata or "" for p in offsets}

    def commit_transaction(self, timeout: float) -> None:
        """Commit, or end as it was told to."""
        self._check()
        ending = self._member.endings.popleft() if self._member.endings else "ok"
        failed = any(error is not None for _, error in self._reports)
        self.poll()
        if failed or ending == "refused":
            raise _abortable(ck.KafkaError._INCONSISTENT)
        if ending != "lost":
            self._broker.invisible.difference_update(self._written)
            self._broker.committed |= self._offsets
            self._broker.notes |= self._notes
            self._written.clear()
        self._offsets.clear()
        self._notes.clear()
        self._broker.sample()
        if ending != "ok":
            self._member.knows_all = self._member.knows_all and ending == "lost"
            raise ck.KafkaException(ck.KafkaError(ck.KafkaError._TIMED_OUT, "nobody knows", False, True))

    def abort_transaction(self, timeout: float) -> None:
        """Leave what was written invisible for ever."""
        self._written.clear()
        self._offsets.clear()
        self._notes.clear()
        self._reports.clear()

    def _check(self) -> None:
        if self._broker.open.get(self._name) is not self:
            raise ck.KafkaException(ck.KafkaError(ck.KafkaError._FENCED, "fenced", True))


def _abortable(code: int) -> ck.KafkaException:
    return ck.KafkaException(ck.KafkaError(code, "told to fail", False, False, True))


class _Nothing:
    """A metric that nobody reads."""

    def labels(self, *_: object) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*_: object) -> None:
    return None


_NOTHING = _Nothing()


class Tally:
    """A counter by its labels."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self._labels: tuple[str, ...] = ()

    def labels(self, *labels: str) -> Tally:
        """Choose what `inc` counts."""
        self._labels = labels
        return self

    def inc(self, amount: float = 1) -> None:
        """Count."""
        self.values[self._labels] = self.values.get(self._labels, 0) + amount


class Tallies:
    """In place of `Metrics`, whose making takes longer than a whole run: what the checker reads, nothing else."""

    def __init__(self) -> None:
        self.requests = Tally()
        self.dead_letters = Tally()

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> _Nothing:
        return _NOTHING


@cache
def settings_of(guarantee: str, ordering: str, dispatch: str, wait_ms: int, replicas: int) -> Settings:
    """Return the settings of a run; reading them takes longer than the run."""
    return memory_settings(
        {
            "model.factory": "tests.models:Double",
            "inference.replicas": replicas,
            "inference.execution_timeout_ms": 400,
            "inference.max_restarts": 50,
            "batch.max_batch_size": 8,
            "batch.max_batch_bytes": 65_536,
            "batch.max_queue_size": 24,
            "batch.dispatch": dispatch,
            "batch.max_wait_ms": wait_ms,
            "delivery.guarantee": guarantee,
            "delivery.ordering": ordering,
            "delivery.commit_interval_ms": 10,
            "delivery.revoke_timeout_ms": 300,
            "delivery.drain_timeout_ms": 300,
        }
    )


class Member:
    """One worker of a run. `number` names its transactional id; `lost` is told what lost its acknowledgement."""

    def __init__(
        self, number: int, broker: Broker, settings: Settings, clock: ManualClock, lost: Callable[[Headers], None]
    ) -> None:
        self.number = number
        self.settings = settings
        self.clock = clock
        self.consumer = GroupConsumer(broker, ["requests"])
        self.metrics = Tallies()
        self.endings: deque[str] = deque()
        self.knows_all = True
        self.producer = ForgetfulProducer(broker, lost)
        rooms = assemble(
            settings,
            (),
            consumer=self.consumer,
            make_outbox=self._make_outbox,
            make_committer=self._make_committer,
        )
        self.pool = rooms.pool
        self.worker = Worker(settings, rooms, self.metrics, Health(clock), clock)  # type: ignore[arg-type]

    def start(self) -> None:
        """Warm up and join."""
        self.worker._warm_up()
        self.worker._join()
        self.worker._turn()

    def _make_outbox(self, encoder: Any) -> Any:
        delivery, dead = self.settings.delivery, self.settings.kafka.dead_letter_topic
        config = producer_config(self.settings.kafka, delivery) | {"transactional.id": f"forebay-{self.number}"}
        if delivery.guarantee == "exactly_once":
            self.outbox: Any = TransactionalOutbox(config, encoder, dead, self.consumer.group_metadata)
        else:
            self.outbox = Outbox(config, encoder, dead, lambda *_, **__: self.producer, delivery.ordering)
        return self.outbox

    def _make_committer(self, outbox: Any, offsets: Any) -> Any:
        delivery = self.settings.delivery
        interval = delivery.commit_interval_ms / 1000
        if isinstance(outbox, TransactionalOutbox):
            return TransactionalCommitter(outbox, offsets, interval, self.consumer)
        return Committer(self.consumer, offsets, interval, remembers=delivery.order_of_results == "none")

    @property
    def is_clear(self) -> bool:
        """Whether nothing that it has sent or committed waits for an answer."""
        waits = self.consumer.commits_in_flight or self.producer.hold_reports or self.endings
        return not waits and not self.outbox.unacknowledged

    @property
    def is_ill(self) -> bool:
        """Whether its model is broken: that is not waited for."""
        return bool(self.worker._breakers)

    def counters(self) -> dict[str, float] | None:
        """Return its metrics as the checker wants them; None where it never learned how a transaction ended."""
        if not self.knows_all:
            return None
        self.worker._observer._refresh(0, self.outbox)
        found: dict[str, float] = {}
        for (_, outcome), value in self.metrics.requests.values.items():
            found[outcome] = found.get(outcome, 0) + value
        found["dead_letters"] = sum(self.metrics.dead_letters.values.values())
        return found
