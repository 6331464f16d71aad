"""A seeded run of a whole group on an in-memory Kafka: deaths at every step, zombies, rebalances, refusals, lost or
late acknowledgements, replicas that die, hang or run out of memory, malformed and late requests.

One thread, one clock that waiting moves, no torch and no sleep, so that a run takes milliseconds and its seed tells it
whole: `FOREBAY_SEED=7 .venv/bin/pytest tests/faults/test_simulation.py` runs number 7 and no other.
"""

from __future__ import annotations

import contextlib
import random
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import confluent_kafka as ck

import forebay.inference.assembly
import forebay.inference.cores
import forebay.stream.patience
import forebay.stream.transactional_producer
import forebay.worker
from forebay import failpoints
from forebay.errors import DeviceLostError
from forebay.records import Headers, Partition
from forebay.testing import ManualClock
from tests.faults.double import double_answers
from tests.faults.history import Fault, History, Logged, Place, Promise, Report, coordinates_of, source_of
from tests.faults.memory_group import PARTITIONS, Broker, Member, Transactions, settings_of
from tests.faults.scripted import Script, ScriptedPoller, ScriptedReplica
from tests.integration.job import ask, ask_binary, magic
from tests.kafka_probe import Send
from tests.magic import Magic

REQUESTS, STEPS = 16, 32
MOST_TURNS = 2000
BUDGET = 0.3
"""Seconds for what a worker began when it gives partitions back: an orderly end within them repeats nothing."""

_REFUSALS = (ck.KafkaError.REQUEST_TIMED_OUT, ck.KafkaError.NOT_ENOUGH_REPLICAS, ck.KafkaError._MSG_TIMED_OUT)
_ON_THE_WAY = ("after_receive", "after_submit", "before_produce", "after_produce")
_SNAGS = {
    "at_least_once": (*_ON_THE_WAY, "before_commit", "after_commit"),
    "exactly_once": (
        *_ON_THE_WAY,
        "before_transaction_offsets",
        "in_transaction",
        "before_transaction_commit",
        "after_transaction_commit",
    ),
}


class Died(BaseException):
    """A worker has passed the place at which it dies: nothing in it may catch this."""


class Snag:
    """A failpoint that ends a worker at its `nth` passing."""

    def __init__(self, place: str, nth: int) -> None:
        self.place = place
        self._left = nth

    def fire(self) -> None:
        """Count a passing."""
        self._left -= 1
        if not self._left:
            raise Died(self.place)


class Run:
    """A seeded run. `promise` says what it must keep and so how it delivers."""

    def __init__(self, seed: int, promise: Promise, requests: int = REQUESTS, steps: int = STEPS) -> None:
        self.dice = random.Random(seed)
        self.promise = promise
        self.steps = steps
        self.clock = ManualClock(step=0.0005)
        self.broker = Broker()
        self.broker.clock_ms = lambda: int(self.clock.now * 1000)
        self.faults: list[Fault] = []
        self.reports: list[Report] = []
        self.members: list[Member] = []
        self.dooms: dict[Member, Snag] = {}
        self.zombies: list[tuple[Member, list[Partition], dict[Place, int]]] = []
        self.making: Member | None = None
        self.killers = 0
        self.unsent = [self._request(number) for number in range(requests)]
        self.script = Script(self.dice, deaths=1 if self.killers else 2)
        self.settings = settings_of(
            promise.guarantee,
            promise.ordering,
            self.dice.choice(("eager", "linger", "static")),
            self.dice.choice((20, 400)),
            self.dice.choice((1, 1, 2)),
        )

    def play(self) -> History:
        """Run to the end and return what is left."""
        with _on_stage(self):
            try:
                for number in range(self.dice.choice((2, 2, 2, 3))):
                    self._join(number)
                for partition in PARTITIONS:
                    self._give(self.dice.choice(self.members), [partition])
                deeds = self._deeds()
                for deed in self.dice.choices(list(deeds), list(deeds.values()), k=self.steps):
                    deed()
                self._finish()
            finally:
                for member in self.members:
                    member.pool.stop()
        return self._history()

    def _deeds(self) -> dict[Callable[[], None], int]:
        return {
            self._turn: 60,
            self._publish: 30,
            self._hand_over: 4,
            self._lose: 4,
            self._return_zombie: 6,
            self._kill: 2,
            self._doom: 6,
            self._drain: 3,
            self._refuse: 5,
            self._delay: 5,
        }

    def make_client(self, config: dict[str, Any], **_: Any) -> Transactions:
        """Stand in for `confluent_kafka.Producer`, which a transactional outbox makes by itself."""
        assert self.making is not None
        return Transactions(self.broker, config["transactional.id"], self.making)

    def make_transport(self, memory: Any) -> ScriptedReplica:
        """Stand in for `InlineTransport`."""
        return ScriptedReplica(memory, self.clock, self.script)

    def _request(self, number: int) -> Send:
        """A request; where keys keep an order, several of them share a key and have their id in a header."""
        send = self._any_request(number)
        if self.promise.ordering != "key":
            return send
        headers = [*send.headers, ("x-request-id", send.key)]
        return replace(send, key=b"key-%d" % (number % 5), headers=headers)

    @property
    def seen(self) -> Counter[str]:
        """What happened in this run, and how often."""
        return self.script.seen

    def _any_request(self, number: int) -> Send:
        chance = self.dice.random()
        headers: list[tuple[str, bytes | None]] = []
        if self.dice.random() < 0.2:
            headers.append(("kafka_correlationId", b"%d" % number))
        if chance < 0.1:
            return Send(b"{", b"bad-%d" % number, headers)
        if chance < 0.14:
            return _asked("magic", number, self.dice.choice((Magic.RAISE, Magic.NAN)))
        if chance < 0.15 and not self.killers:
            self.killers += 1
            return _asked("magic", number, self.dice.choice((Magic.SEGFAULT, Magic.EXIT, Magic.HANG)))
        if chance < 0.3:
            headers.append(("priority", b"1"))
        if chance > 0.92:
            headers.append(("timeout-ms", self.dice.choice((b"1", b"30", b"300"))))
        if chance > 0.97:
            headers.append(("kafka_replyTopic", b"forbidden"))
        send = _asked("binary" if number % 2 else "json", number)
        return replace(send, headers=[*send.headers, *headers])

    def _turn(self) -> None:
        self.clock.advance(self.dice.choice((0.001, 0.01, 0.05)))
        member = self.dice.choice(self.members)
        self._drive(member, member.worker._turn)

    def _publish(self) -> None:
        for _ in range(min(self.dice.randrange(1, 9), len(self.unsent))):
            send = self.unsent.pop()
            place = self.dice.randrange(len(PARTITIONS))
            self.broker.append("requests", send.value, send.key, list(send.headers), place)

    def _drive(self, member: Member, act: Callable[[], None]) -> bool:
        """Let a member act; False if that was its death."""
        doom = self.dooms.get(member)
        self.making = member
        failpoints.arm([doom] if doom else [])  # type: ignore[list-item]
        try:
            act()
        except Died as death:
            self.script.seen[f"died {death}"] += 1
            self._bury(member)
            return False
        except DeviceLostError as error:
            self._give_up(member, error)
            return False
        finally:
            failpoints.arm([])
        return True

    def _join(self, number: int) -> Member:
        member = Member(number, self.broker, self.settings, self.clock, self._lost_acknowledgement)
        self.making = member
        member.start()
        self.members.append(member)
        return member

    def _lost_acknowledgement(self, headers: Headers) -> None:
        """Note whose outcome, or dead letter, will come again; it may be a request that somebody else has by now."""
        assert self.making is not None
        self.making.knows_all = False
        record = Logged("", 0, 0, None, None, tuple(headers))
        source = coordinates_of(record) or source_of(record)
        assert source is not None
        place, offset = source[:2], source[2]
        self.script.seen["an acknowledgement was lost"] += 1
        self.faults.append(Fault("an acknowledgement was lost", {place: offset}, {place: offset + 1}))

    def _fault(self, name: str, committed: dict[Place, int] | None = None) -> None:
        self.script.seen[name] += 1
        self.faults.append(
            Fault(name, self._committed() if committed is None else committed, self.broker.ends("requests"))
        )

    def _give(self, member: Member, partitions: Iterable[Partition]) -> None:
        given = list(partitions)
        if given:
            member.consumer.assign(given)
            self._turn_of(member)

    def _turn_of(self, member: Member) -> bool:
        self.clock.advance(0.03)
        return self._drive(member, member.worker._turn)

    def _settle(self, member: Member) -> bool:
        """Let what was sent be acknowledged, so that an orderly end has no excuse for repeating anything."""
        member.producer.hold_reports = False
        member.endings.clear()
        self.broker.fail_commits.clear()
        for topic in self.broker.topics.values():
            topic.fail.clear()
        for _ in range(400):
            if member.is_clear:
                return True
            if not self._turn_of(member):
                return False
        return True

    def _hand_over(self) -> None:
        """Revoke a partition in good order, and give it to another member."""
        giver, taker = self.dice.sample(self.members, 2)
        if not giver.consumer.owned or self._is_zombie(giver) or self._is_zombie(taker):
            return
        is_patient = self._is_patient(giver)
        if is_patient and not self._settle(giver):
            return
        partition = self.dice.choice(giver.consumer.owned)
        if self.dice.random() < 0.1:
            self.dooms.setdefault(giver, Snag("during_revoke", 1))
        giver.consumer.revoke([partition])
        began, is_ill = self.clock.now, giver.is_ill
        if not self._turn_of(giver):
            self._adopt()
            return
        if not is_patient or is_ill or giver.is_ill or self.clock.now - began > BUDGET:
            self._fault("revoked in haste")
        self._give(taker, [partition])

    def _adopt(self) -> None:
        """Give away what nobody has: its owner gave it back, and died in the same turn."""
        alive = [member for member in self.members if not self._is_zombie(member)]
        owned = {place for member in alive for place in member.consumer.owned}
        free = [place for place in PARTITIONS if place not in owned]
        if alive:
            self._give(self.dice.choice(alive), free)

    def _is_patient(self, member: Member) -> bool:
        """Let most orderly ends find nothing unanswered; the others are as bad as a death, and no worse."""
        return self.dice.random() >= 0.3

    def _lose(self) -> None:
        """Expel a member that does not know it yet; its partitions go to another one."""
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
            self._fault("expelled", committed)  # it has read on until now

    def _is_zombie(self, member: Member) -> bool:
        return any(zombie is member for zombie, *_ in self.zombies)

    def _kill(self) -> None:
        """Let a member die between two turns."""
        self._bury(self.dice.choice(self.members))

    def _doom(self) -> None:
        """Let a member die within one of its next turns."""
        place = self.dice.choice(_SNAGS[self.promise.guarantee])
        self.dooms.setdefault(self.dice.choice(self.members), Snag(place, self.dice.randrange(1, 4)))

    def _bury(self, victim: Member) -> None:
        """Let a successor with its name take what was a dead member's; a zombie's belongs to somebody else."""
        self.reports.append(Report(f"killed-{len(self.reports)}", -9, frozenset({-9})))
        owned = self._remove(victim)
        self._fault("killed")
        victim.pool.stop()
        self._give(self._join(victim.number), owned)

    def _remove(self, member: Member) -> list[Partition]:
        """Take a member out; return the partitions that are free now."""
        self.members.remove(member)
        self.dooms.pop(member, None)
        for zombie in self.zombies:
            if zombie[0] is member:
                self.zombies.remove(zombie)
                self.broker.expelled.discard(member.consumer)
                self._fault("expelled", zombie[2])
                return [place for place in member.consumer.owned if place not in zombie[1]]
        return member.consumer.owned

    def _give_up(self, member: Member, error: DeviceLostError) -> None:
        """Do what `Worker.run` does at its end, and what whoever started the worker does about 75."""
        owned = self._remove(member)
        self._fault("it lost its device")
        member.worker._leave()
        self.reports.append(Report(f"gave-up-{len(self.reports)}", error.exit_code, frozenset({75})))
        self._give(self._join(member.number), owned)

    def _drain(self) -> None:
        """End a member as SIGTERM does."""
        member = self.dice.choice(self.members)
        if self._is_zombie(member):
            return
        is_patient = self._is_patient(member)
        if is_patient and not self._settle(member):
            return
        if self.dice.random() < 0.1:
            self.dooms.setdefault(member, Snag("during_drain", 1))
        owned = member.consumer.owned
        began, is_ill = self.clock.now, member.is_ill
        if not self._leave(member, knows_all=is_patient):
            return
        if not is_patient or is_ill or member.is_ill or self.clock.now - began > BUDGET:
            self._fault("drained in haste")
        self._give(self._join(member.number), owned)

    def _leave(self, member: Member, *, knows_all: bool = True) -> bool:
        """End a member; one that has left without its acknowledgements cannot have counted them."""
        counters: list[Any] = []

        def leave() -> None:
            member.worker._drain()
            counters.append(member.counters() if knows_all else None)
            member.worker._leave()

        if not self._drive(member, leave):
            return False
        self._remove(member)
        self.reports.append(Report(f"drained-{len(self.reports)}", 0, counters=counters[0]))
        return True

    def _refuse(self) -> None:
        """Let the next produces, commits or transactions fail, or acknowledgements get lost."""
        member = self.dice.choice(self.members)
        times = self.dice.randrange(1, 5)
        kind = self.dice.randrange(5)
        if kind == 0:
            self.broker.fail_commits.extend([ck.KafkaError.REBALANCE_IN_PROGRESS] * times)
        elif self.promise.guarantee == "exactly_once":
            if kind < 3:
                member.endings.extend(self.dice.choices(["lost", "unknown", "refused"], k=times))
        elif self.promise.ordering == "none":
            # Where order is promised, what is on its way when another is refused may overtake it, and that is told.
            topic = self.dice.choice(("results", "dead"))
            if kind == 1:
                member.producer.forget(topic, times)
            else:
                self.broker.fail_next(topic, self.dice.choice(_REFUSALS), times)

    def _delay(self) -> None:
        """Hold the delivery reports of a member back, or let them go."""
        member = self.dice.choice(self.members)
        member.producer.hold_reports = not member.producer.hold_reports

    def _committed(self) -> dict[Place, int]:
        return {(topic, number): mark for (topic, number), mark in self.broker.committed.items()}

    def _finish(self) -> None:
        """Publish the rest, heal everything, and turn until nothing is left; then end the members."""
        while self.unsent:
            self._publish()
        while self.zombies:
            self._return_zombie()
        self.dooms.clear()
        self._adopt()
        for member in list(self.members):
            self._settle(member)
        ends = {Partition(*place): end for place, end in self.broker.ends("requests").items() if end}
        for _ in range(MOST_TURNS):
            if ends.items() <= self.broker.committed.items():
                break
            for member in list(self.members):
                if self._turn_of(member):
                    self._drive(member, lambda member=member: member.worker._dispatch(self.clock(), draining=True))
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


@cache
def _asked(kind: str, number: int, magic_number: int = 0) -> Send:
    if kind == "magic":
        return magic(f"magic-{number}", magic_number)
    return ask_binary(number) if kind == "binary" else ask(number)


class _Silent:
    """A logger that is not there: a line costs more than a turn of the loop."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


_SILENT = _Silent()


@cache
def _loggers() -> list[Any]:
    return [module for name, module in sys.modules.items() if name.startswith("forebay.") and hasattr(module, "_log")]


def _begin_at_once(patience: Any, call: Any, _: float) -> None:
    """Make the call now; a death in it is the worker's, an error is met where the call is seen to have ended."""
    patience.error = None
    try:
        patience.value = call()
    except ck.KafkaException as error:
        patience.error = error


def _ended(patience: Any, wait: float = 0.0) -> bool:
    if patience.error is not None:
        raise patience.error
    return True


@contextlib.contextmanager
def _on_stage(run: Run) -> Iterator[None]:
    """Put the run's doubles where the worker looks for time, clients, transports and logs; take them away again."""

    def no_watchdog(*_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    changes: list[tuple[Any, str, Any]] = [
        (ck, "Producer", run.make_client),
        (select, "poll", lambda: ScriptedPoller(run.clock)),
        (time, "sleep", run.clock.advance),
        (time, "time", lambda: run.clock.now),
        (forebay.inference.assembly, "InlineTransport", run.make_transport),
        (forebay.inference.cores, "cores", lambda _: 2),  # it reads the control group's files
        (forebay.worker, "leave_within", no_watchdog),
        (forebay.stream.transactional_producer, "leave_within", no_watchdog),
        (forebay.stream.patience.Patience, "begin", _begin_at_once),  # it starts a thread
        (forebay.stream.patience.Patience, "ended", _ended),
        *((module, "_log", _SILENT) for module in _loggers()),
    ]
    before = [(target, name, getattr(target, name)) for target, name, _ in changes]
    try:
        for target, name, value in changes:
            setattr(target, name, value)
        yield
    finally:
        for target, name, value in before:
            setattr(target, name, value)
