"""The corridor under any order of events: crashes, rebalances, refusals and silence, in every mixture.

Whatever happens, no offset is committed below which a record has no outcome, and once the trouble is over every
record has exactly one, or more where its partition was taken away in between.
"""

from __future__ import annotations

from collections import defaultdict

import confluent_kafka as ck
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.inference.replicas import State
from forebay.records import Code, Partition
from tests.unit.builders import vector_request
from tests.unit.test_worker import VECTOR, Scene

P0, P1 = Partition("requests", 0), Partition("requests", 1)
PARTITIONS = st.sampled_from([P0, P1])
KINDS = st.sampled_from(["good", "good", "good", "malformed", "urgent", "expiring", "large", "unknown"])
E = ck.KafkaError


class Corridor(RuleBasedStateMachine):
    """One worker, two partitions, and everything that can go wrong around it."""

    ordering = "none"
    make_scene: type[Scene] = Scene

    def __init__(self) -> None:
        super().__init__()
        self.scene = self.make_scene(
            2,
            max_attempts=2,
            batch__max_batch_size=4,
            batch__max_queue_size=12,
            delivery__ordering=self.ordering,
            delivery__revoke_timeout_ms=200,
        )
        self.scene.join()
        self.assigned = {P0, P1}
        self.taken_away: set[Partition] = set()
        self.replica = self.scene.replica

    # what the world does

    @rule(where=PARTITIONS, kind=KINDS, number=st.integers(1, 3))
    def publish(self, where: Partition, kind: str, number: int) -> None:
        for _ in range(number):
            options = {"urgent": {"priority": 1}, "expiring": {"timeout_ms": 100}, "unknown": {"model": "nobody"}}
            value, headers = vector_request(rows=6 if kind == "large" else 1, **options.get(kind, {}))
            if kind == "malformed":
                value = value[:-1]
            self.scene.broker.append("requests", value, None, headers, where.partition)

    @rule(times=st.integers(1, 12))
    def turn(self, times: int) -> None:
        self.scene.turn(times)

    @precondition(lambda self: self.replica.jobs and self.replica.alive)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        count = self.replica.jobs[0].requests
        left = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count - 1))
        self.replica.finish(left=left)
        self.scene.turn()

    @precondition(lambda self: self.replica.alive and self.scene.pool._stillborn < 4)
    @rule()
    def die(self) -> None:
        if self.scene.pool._replicas[0].state is State.READY:
            self.replica.die()

    @precondition(lambda self: self.replica.jobs and self.scene.pool._stillborn < 4)
    @rule()
    def hang(self) -> None:
        self.scene.clock.advance(31)
        self.scene.turn()

    @rule()
    def get_ready(self) -> None:
        if self.replica.alive and self.scene.pool._replicas[0].state is State.STARTING:
            self.replica.get_ready(VECTOR)

    @rule(silent=st.booleans())
    def acknowledge(self, silent: bool) -> None:
        self.scene.producer.hold_reports = silent

    @precondition(lambda self: self.ordering == "none")
    @rule(code=st.sampled_from([E.REQUEST_TIMED_OUT, E.TOPIC_AUTHORIZATION_FAILED]), times=st.integers(1, 3))
    def refuse_results(self, code: int, times: int) -> None:
        self.scene.broker.fail_next("results", code, times)

    @rule(times=st.integers(1, 3))
    def refuse_dead_letters(self, times: int) -> None:
        self.scene.broker.fail_next("dead", E.NOT_ENOUGH_REPLICAS, times)

    @rule()
    def refuse_a_commit(self) -> None:
        self.scene.broker.fail_commits.append(E.REBALANCE_IN_PROGRESS)

    @rule(where=PARTITIONS, gently=st.booleans())
    def take_away(self, where: Partition, gently: bool) -> None:
        if where in self.assigned:
            self.assigned.remove(where)
            self.taken_away.add(where)
            (self.scene.consumer.revoke if gently else self.scene.consumer.lose)([where])
            self.scene.turn()

    @rule(where=PARTITIONS)
    def give(self, where: Partition) -> None:
        if where not in self.assigned:
            self.assigned.add(where)
            self.scene.consumer.assign([where])
            self.scene.turn()

    # what must hold

    def outcomes(self) -> dict[str, list[bytes | None]]:
        """The error code, or None, of every outcome of each record, in order."""
        found: dict[str, list[bytes | None]] = defaultdict(list)
        for one in self.scene.broker.records("results"):
            headers = dict(one.headers)
            found[(headers["source"] or b"").decode()].append(headers.get("error-code"))
        return found

    @invariant()
    def nothing_unanswered_is_committed(self) -> None:
        found = self.outcomes()
        for where, mark in self.scene.broker.committed.items():
            for offset in range(mark):
                assert found[f"{where.topic}/{where.partition}/{offset}"], f"{where} was committed up to {mark}"

    @invariant()
    def the_books_balance(self) -> None:
        custody = self.scene.worker._custody
        assert custody.requests >= 0
        assert custody.bytes >= 0
        if not custody.requests:
            assert custody.bytes == 0

    def teardown(self) -> None:
        """Once the trouble is over everything is answered, committed and forgotten."""
        scene = self.scene
        scene.producer.hold_reports = False
        for topic in scene.broker.topics.values():
            topic.fail.clear()
        scene.broker.fail_commits.clear()
        for where in (P0, P1):
            self.give(where)
        for _ in range(600):
            self.get_ready()
            if self.replica.alive and self.replica.jobs:
                self.replica.finish()
            scene.turn(1, seconds=0.3)
            if self._is_over():
                break
        assert self._is_over(), self._what_is_open()
        self._check_outcomes()
        assert scene.worker._room() == scene.settings.batch.queue_size
        assert scene.worker._custody.requests == 0

    def _is_over(self) -> bool:
        logs = self.scene.broker.topics["requests"].partitions
        committed = [self.scene.broker.committed.get(Partition("requests", number), 0) for number in range(len(logs))]
        answered = committed == list(map(len, logs)) and not self.scene.worker._custody.requests
        return answered and not self.scene.pool.in_flight  # a replica may still have a request that was late

    def _what_is_open(self) -> str:
        worker, logs = self.scene.worker, self.scene.broker.topics["requests"].partitions
        ledgers = {where: (ledger.watermark, ledger.running) for where, ledger in worker._offsets}
        return (
            f"read {[len(log) for log in logs]}, committed {self.scene.broker.committed}, ledgers {ledgers}, in "
            f"custody {worker._custody.requests}, in flight {self.scene.pool.in_flight}, unacknowledged "
            f"{worker._outbox.unacknowledged}, commits in flight {self.scene.consumer.commits_in_flight}"
        )

    def _check_outcomes(self) -> None:
        found = self.outcomes()
        letters = defaultdict(list)
        for one in self.scene.broker.records("dead"):
            headers = dict(one.headers)
            place = headers["kafka_dlt-original-partition"] or b"", headers["kafka_dlt-original-offset"] or b""
            letters[tuple(int.from_bytes(part, "big") for part in place)].append(headers["forebay-error-code"])
        for where in (P0, P1):
            for one in self.scene.broker.topics["requests"].partitions[where.partition]:
                codes = found[one.source]
                assert len(codes) >= 1
                if where not in self.taken_away:
                    assert len(codes) == 1, f"{one.source} has the outcomes {codes}"
                late = Code.DEADLINE_EXCEEDED.value.encode()
                assert sorted(letters[where.partition, one.offset]) == sorted(
                    code for code in codes if code not in (None, late)
                )


class CorridorInOrder(Corridor):
    """The same, with results in the order of their partition."""

    ordering = "partition"

    @invariant()
    def results_leave_in_order(self) -> None:
        last = {P0: -1, P1: -1}
        for one in self.scene.broker.records("results"):
            source = dict(one.headers)["source"]
            topic, partition, offset = (source or b"").decode().split("/")
            where = Partition(topic, int(partition))
            if where not in self.taken_away:
                assert int(offset) == last[where] + 1
            last[where] = int(offset)


TestCorridor = Corridor.TestCase
TestCorridorInOrder = CorridorInOrder.TestCase
TestCorridor.settings = TestCorridorInOrder.settings = settings(max_examples=20, stateful_step_count=25)
