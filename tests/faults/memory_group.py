"""A group of real workers on an in-memory Kafka, driven by a seed: deaths, zombies, rebalances, refusals, late reports.

Everything happens on one thread and on a clock of its own, so a seed tells a run whole. Only Kafka is a double; it
refuses what a real one refuses: commits and transactions of a member that the group has expelled.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import confluent_kafka as ck

from forebay.assembly import assemble
from forebay.health import Health
from forebay.metrics import Metrics
from forebay.records import Partition
from forebay.stream.client_config import producer_config
from forebay.stream.committer import Committer
from forebay.stream.consumer import Listener
from forebay.stream.outbox import Outbox
from forebay.stream.transaction_offsets import TransactionalCommitter
from forebay.stream.transactions import TransactionalOutbox
from forebay.testing import ManualClock, MemoryBroker, MemoryConsumer, MemoryProducer, memory_settings
from forebay.worker import Worker
from tests.faults.double import double_answers
from tests.faults.history import Fault, History, Logged, Place, Position, Promise, Report, Sample
from tests.integration.job import ask, ask_binary, magic
from tests.kafka_probe import Send
from tests.models import Magic

ROOT = Path(__file__).resolve().parents[2]
PARTITIONS = [Partition("requests", number) for number in range(3)]
MOST_TURNS = 3000
_REFUSALS = (ck.KafkaError.REQUEST_TIMED_OUT, ck.KafkaError.NOT_ENOUGH_REPLICAS, ck.KafkaError._MSG_TIMED_OUT)


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
        """The partitions that it reads."""
        return list(self._positions)

    def commit(self, marks: dict[Partition, int], notes: Mapping[Partition, str] | None = None) -> None:
        """Commit unless the group has expelled this member."""
        if self in self._broker.expelled:
            self._broker.fail_commits.appendleft(ck.KafkaError.UNKNOWN_MEMBER_ID)
        super().commit(marks, notes)
        self._broker.sample()

    def group_metadata(self) -> GroupConsumer:
        """Return who asks."""
        return self


class Transactions(MemoryProducer):
    """A transactional producer. Its member's `endings` say how the next commits end: "lost", "unknown", "refused"."""

    _broker: Broker

    def __init__(self, broker: Broker, name: str, member: Member) -> None:
        super().__init__(broker)
        self._name = name
        self._member = member
        self._written: list[Position] = []
        self._offsets: dict[Partition, int] = {}

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
            self._written.clear()
        self._offsets.clear()
        self._broker.sample()
        if ending != "ok":
            self._member.knows_all = self._member.knows_all and ending == "lost"
            raise ck.KafkaException(ck.KafkaError(ck.KafkaError._TIMED_OUT, "nobody knows", False, True))

    def abort_transaction(self, timeout: float) -> None:
        """Leave what was written invisible for ever."""
        self._written.clear()
        self._offsets.clear()
        self._reports.clear()

    def _check(self) -> None:
        if self._broker.open.get(self._name) is not self:
            raise ck.KafkaException(ck.KafkaError(ck.KafkaError._FENCED, "fenced", True))


def _abortable(code: int) -> ck.KafkaException:
    return ck.KafkaException(ck.KafkaError(code, "told to fail", False, False, True))


class Member:
    """One worker of the run. `number` names its transactional id."""

    def __init__(self, run: Run, number: int) -> None:
        self.number = number
        self.consumer = GroupConsumer(run.broker, ["requests"])
        self.metrics = Metrics()
        self.endings: deque[str] = deque()
        self.knows_all = True
        self.producer = MemoryProducer(run.broker)
        settings = run.settings
        config = producer_config(settings.kafka, settings.delivery) | {"transactional.id": f"forebay-{number}"}
        dead, interval = settings.kafka.dead_letter_topic, settings.delivery.commit_interval_ms / 1000

        def make_outbox(encoder: Any) -> Any:
            if run.promise.guarantee == "exactly_once":
                self.outbox: Any = TransactionalOutbox(config, encoder, dead, self.consumer.group_metadata)
            else:
                order = settings.delivery.ordering
                self.outbox = Outbox(config, encoder, dead, lambda *_, **__: self.producer, order)
            return self.outbox

        def make_committer(outbox: Any, offsets: Any) -> Any:
            if isinstance(outbox, TransactionalOutbox):
                return TransactionalCommitter(outbox, offsets, interval)
            return Committer(self.consumer, offsets, interval, remembers=settings.delivery.order_of_results == "none")

        rooms = assemble(
            settings, [ROOT], consumer=self.consumer, make_outbox=make_outbox, make_committer=make_committer
        )
        self.worker = Worker(settings, rooms, self.metrics, Health(), run.clock)
        run.making = self
        self.worker._warm_up()
        self.worker._join()
        self.worker._turn()

    @property
    def is_clear(self) -> bool:
        """Whether nothing that it has sent or committed waits for an answer."""
        waits = self.consumer.commits_in_flight or self.producer.hold_reports or self.endings
        return not waits and not self.outbox.unacknowledged

    def counters(self) -> dict[str, float] | None:
        """Return its metrics as the checker wants them; None where it never learned how a transaction ended."""
        if not self.knows_all:
            return None
        self.worker._observer._refresh(0, self.outbox)
        found: dict[str, float] = {}
        for sample in next(iter(self.metrics.requests.collect())).samples:
            if sample.name.endswith("_total"):
                found[sample.labels["outcome"]] = found.get(sample.labels["outcome"], 0) + sample.value
        letters = next(iter(self.metrics.dead_letters.collect())).samples
        found["dead_letters"] = sum(sample.value for sample in letters if sample.name.endswith("_total"))
        return found


class Run:
    """A seeded run. `exactly_once` decides the outbox, `ordering` the order of results."""

    def __init__(self, seed: int, monkeypatch: Any, promise: Promise, requests: int = 120) -> None:
        self.dice = random.Random(seed)
        self.promise = promise
        self.clock = ManualClock(step=0.0005)
        self.broker = Broker()
        self.faults: list[Fault] = []
        self.reports: list[Report] = []
        self.members: list[Member] = []
        self.zombies: list[tuple[Member, list[Partition], dict[Place, int]]] = []
        self.making: Member | None = None
        self.unsent = [self._request(number) for number in range(requests)]
        self.settings = memory_settings(
            {
                "model.factory": "tests.models:Double",
                "batch.max_batch_size": 8,
                "batch.max_queue_size": 24,
                "batch.dispatch": self.dice.choice(["eager", "linger", "static"]),
                "batch.max_wait_ms": self.dice.choice([20, 400]),
                "delivery.guarantee": promise.guarantee,
                "delivery.ordering": promise.ordering,
                "delivery.commit_interval_ms": 10,
                "delivery.revoke_timeout_ms": 300,
                "delivery.drain_timeout_ms": 300,
            }
        )
        monkeypatch.setattr(ck, "Producer", self._producer)
        monkeypatch.setattr("time.sleep", self.clock.advance)

    def _producer(self, config: dict[str, Any], **_: Any) -> Transactions:
        assert self.making is not None
        return Transactions(self.broker, config["transactional.id"], self.making)

    def _request(self, number: int) -> Send:
        """A request; where keys keep an order, several of them share a key and have their id in a header."""
        send = self._any_request(number)
        if self.promise.ordering != "key":
            return send
        headers = [*send.headers, ("x-request-id", send.key)]
        return replace(send, key=b"key-%d" % (number % 5), headers=headers)

    def _any_request(self, number: int) -> Send:
        chance = self.dice.random()
        headers: list[tuple[str, bytes | None]] = []
        if self.dice.random() < 0.2:
            headers.append(("kafka_correlationId", b"%d" % number))
        if chance < 0.12:
            return Send(b"{", b"bad-%d" % number, headers)
        if chance < 0.16:
            return magic(f"magic-{number}", self.dice.choice([Magic.RAISE, Magic.NAN]))
        if chance < 0.3:
            headers.append(("priority", b"1"))
        return ask_binary(number, headers=headers) if number % 2 else ask(number, headers=headers)

    def play(self, steps: int = 150) -> History:
        """Run to the end and return what is left."""
        self._join(0)
        self._join(1)
        for partition in PARTITIONS:
            self._give(self.dice.choice(self.members), [partition])
        deeds: dict[Callable[[], None], int] = {
            self._turn: 60,
            self._publish: 30,
            self._hand_over: 3,
            self._lose: 3,
            self._return_zombie: 6,
            self._kill: 2,
            self._drain: 2,
            self._refuse: 4,
            self._delay: 4,
        }
        for _ in range(steps):
            self.dice.choices(list(deeds), list(deeds.values()))[0]()
        self._finish()
        return self._history()

    def _turn(self) -> None:
        member = self.dice.choice(self.members)
        self.making = member
        self.clock.advance(self.dice.choice([0.001, 0.01, 0.05]))
        member.worker._turn()

    def _publish(self) -> None:
        for _ in range(min(self.dice.randrange(1, 9), len(self.unsent))):
            send = self.unsent.pop()
            place = self.dice.randrange(len(PARTITIONS))
            self.broker.append("requests", send.value, send.key, list(send.headers), place)

    def _join(self, number: int) -> Member:
        member = Member(self, number)
        self.members.append(member)
        return member

    def _give(self, member: Member, partitions: Iterable[Partition]) -> None:
        given = list(partitions)
        if given:
            member.consumer.assign(given)
            self._turn_of(member)

    def _turn_of(self, member: Member, times: int = 1) -> None:
        self.making = member
        for _ in range(times):
            self.clock.advance(0.03)
            member.worker._turn()

    def _settle(self, member: Member) -> None:
        """Let what was sent be acknowledged, so that an orderly end has no excuse for repeating anything."""
        member.producer.hold_reports = False
        self.broker.fail_commits.clear()
        for topic in self.broker.topics.values():
            topic.fail.clear()
        for _ in range(400):
            if member.is_clear:
                return
            self._turn_of(member)

    def _is_patient(self, member: Member) -> bool:
        """Let most orderly ends find nothing unanswered; the others are as bad as a death, and no worse."""
        if self.dice.random() < 0.3:
            return False
        self._settle(member)
        return True

    def _hand_over(self) -> None:
        """Revoke a partition in good order, and give it to the other member."""
        giver, taker = self.dice.sample(self.members, 2)
        if not giver.consumer.owned or self._is_zombie(giver) or self._is_zombie(taker):
            return
        is_patient = self._is_patient(giver)
        partition = self.dice.choice(giver.consumer.owned)
        giver.consumer.revoke([partition])
        self._turn_of(giver)
        if not is_patient:
            self.faults.append(Fault("revoked in haste", self._committed(), self.broker.ends("requests")))
        self._give(taker, [partition])

    def _lose(self) -> None:
        """Expel a member that does not know it yet; its partitions go to the other one."""
        zombie, taker = self.dice.sample(self.members, 2)
        if self._is_zombie(zombie) or self._is_zombie(taker) or not zombie.consumer.owned:
            return
        partitions = zombie.consumer.owned
        self.broker.expelled.add(zombie.consumer)
        self.zombies.append((zombie, partitions, self._committed()))
        self._give(taker, partitions)

    def _return_zombie(self) -> None:
        """Let an expelled member learn of it and join again, with nothing at first."""
        if self.zombies:
            zombie, partitions, committed = self.zombies.pop()
            zombie.consumer.lose(partitions)
            self.broker.expelled.discard(zombie.consumer)
            self._turn_of(zombie)
            self.faults.append(Fault("expelled", committed, self.broker.ends("requests")))  # it has read on until now

    def _is_zombie(self, member: Member) -> bool:
        return any(zombie is member for zombie, *_ in self.zombies)

    def _kill(self) -> None:
        """Let a member die between two turns; a successor with its name takes its partitions."""
        victim = self.dice.choice(self.members)
        if self._is_zombie(victim):
            self._return_zombie()
        self.faults.append(Fault("killed", self._committed(), self.broker.ends("requests")))
        self.members.remove(victim)
        self.reports.append(Report(f"killed-{len(self.reports)}", -9, frozenset({-9})))
        owned = victim.consumer.owned
        self._give(self._join(victim.number), owned)

    def _drain(self) -> None:
        """End a member as SIGTERM does."""
        member = self.dice.choice(self.members)
        if self._is_zombie(member):
            self._return_zombie()
        is_patient = self._is_patient(member)
        owned = member.consumer.owned
        self._leave(member, knows_all=is_patient)
        if not is_patient:
            self.faults.append(Fault("drained in haste", self._committed(), self.broker.ends("requests")))
        self._give(self._join(member.number), owned)

    def _leave(self, member: Member, *, knows_all: bool = True) -> None:
        """End a member; one that has left without its acknowledgements cannot have counted them."""
        self.members.remove(member)
        self.making = member
        member.worker._drain()
        counters = member.counters() if knows_all else None
        member.worker._leave()
        self.reports.append(Report(f"drained-{len(self.reports)}", 0, counters=counters))

    def _refuse(self) -> None:
        """Let the next produces, commits or transactions fail."""
        member = self.dice.choice(self.members)
        times = self.dice.randrange(1, 5)
        kind = self.dice.randrange(4)
        if kind == 0:
            self.broker.fail_commits.extend([ck.KafkaError.REBALANCE_IN_PROGRESS] * times)
        elif kind == 1 and self.promise.guarantee == "exactly_once":
            member.endings.extend(self.dice.choices(["lost", "unknown", "refused"], k=times))
        elif self.promise == Promise():  # what is on its way when another is refused may overtake it, and that is told
            self.broker.fail_next(self.dice.choice(["results", "dead"]), self.dice.choice(_REFUSALS), times)

    def _delay(self) -> None:
        """Hold the delivery reports of a member back, or let them go."""
        member = self.dice.choice(self.members)
        member.producer.hold_reports = not member.producer.hold_reports

    def _committed(self) -> dict[Place, int]:
        return {(topic, number): mark for (topic, number), mark in self.broker.committed.items()}

    def _finish(self) -> None:
        """Publish the rest, heal everything, and turn until nothing is left; then end both members."""
        while self.unsent:
            self._publish()
        while self.zombies:
            self._return_zombie()
        for member in self.members:
            self._settle(member)
        ends = {Partition(*place): end for place, end in self.broker.ends("requests").items() if end}
        for _ in range(MOST_TURNS):
            if ends.items() <= self.broker.committed.items():
                break
            for member in self.members:
                self._turn_of(member)
                member.worker._dispatch(self.clock(), draining=True)
        for member in list(self.members):
            self._leave(member)

    def _history(self) -> History:
        broker = self.broker

        def log(topic: str) -> tuple[Logged, ...]:
            return tuple(
                Logged(r.topic, r.partition, r.offset, r.key, r.value, tuple(r.headers)) for r in broker.records(topic)
            )

        return History(
            self.promise,
            log("requests"),
            log("results"),
            log("dead"),
            frozenset(broker.invisible),
            self._committed(),
            broker.ends("requests"),
            samples=tuple(broker.samples),
            faults=tuple(self.faults),
            workers=tuple(self.reports),
            answers=double_answers,
        )
