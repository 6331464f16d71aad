"""Where results keep an order, nothing overtakes an outcome that a broker has refused for now."""

from __future__ import annotations

from typing import Any, Literal

import confluent_kafka as ck
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.records import Code, Failure, Outcome, Partition
from forebay.stream.memory import MemoryBroker, MemoryProducer
from forebay.stream.outbox import Outbox
from forebay.stream.results import Encoder
from tests.unit.builders import request, signature

ENCODER = Encoder([signature()], "results", "group")
E = ck.KafkaError
Ordering = Literal["none", "partition", "key"]


class Scene:
    """An outbox that keeps an order, on an in-memory broker that reports one poll later."""

    def __init__(self, ordering: Ordering) -> None:
        self.broker = MemoryBroker({"results": 1, "dead": 1})
        self.producer = MemoryProducer(self.broker)
        self.outbox = Outbox({}, ENCODER, "dead", make_client=lambda *_, **__: self.producer, ordering=ordering)
        self.outbox.start()
        self.now = 0.0
        self.closed: list[Outcome] = []

    def send(self, *names: str, partition: int = 0, key: bytes | None = None) -> None:
        for name in names:
            self.outbox.send(outcome(name, partition, key), self.now)

    def serve(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.closed += self.outbox.serve(self.now)

    def serve_until_closed(self) -> None:
        for _ in range(2_000):
            if not self.outbox.unacknowledged:
                return
            self.serve(0.5)
        raise AssertionError(f"{self.outbox.unacknowledged} are not acknowledged: {self.outbox.trouble}")

    @property
    def arrived(self) -> list[str]:
        return [(one.key or b"").decode() for one in self.broker.records("results")]


def outcome(name: str, partition: int = 0, key: bytes | None = None) -> Outcome:
    asked = request(name)
    asked.record.partition, asked.record.key = partition, key
    asked.record.offset = int("".join(filter(str.isdigit, name)) or 0)
    return ENCODER.error(asked, Failure(Code.DEADLINE_EXCEEDED, "why"))


@pytest.mark.parametrize("ordering", ["partition", "key"])
def test_later_outcomes_of_a_line_wait_behind_one_that_was_refused(ordering: Ordering) -> None:
    scene = Scene(ordering)
    scene.broker.fail_next("results", E.NOT_ENOUGH_REPLICAS, times=3)
    scene.send("r0")
    scene.serve()
    scene.send("r1", "r2")
    scene.serve()
    scene.send("r3")
    assert scene.arrived == []
    scene.serve_until_closed()
    assert scene.arrived == ["r0", "r1", "r2", "r3"]
    assert len(scene.closed) == 4


def test_without_an_order_nobody_waits() -> None:
    scene = Scene("none")
    scene.broker.fail_next("results", E.NOT_ENOUGH_REPLICAS, times=1)
    scene.send("r0")
    scene.serve()
    scene.send("r1")
    scene.serve_until_closed()
    assert scene.arrived == ["r1", "r0"]


def test_outcomes_that_were_refused_together_leave_in_their_order() -> None:
    scene = Scene("partition")
    scene.broker.fail_next("results", E.TOPIC_AUTHORIZATION_FAILED, times=5)
    scene.send(*(f"r{number}" for number in range(5)))
    scene.serve()
    scene.send("r5")
    scene.serve_until_closed()
    assert scene.arrived == [f"r{number}" for number in range(6)]


@pytest.mark.parametrize("ordering", ["partition", "key"])
def test_a_line_in_trouble_holds_up_no_other(ordering: Ordering) -> None:
    scene = Scene(ordering)
    scene.broker.fail_next("results", E.NOT_ENOUGH_REPLICAS, times=1)
    scene.send("r0", partition=0)
    scene.serve()
    scene.send("r1", partition=1)
    scene.send("r2", partition=0)
    assert scene.arrived == ["r1"]
    scene.serve_until_closed()
    assert scene.arrived == ["r1", "r0", "r2"]


def test_keys_of_one_partition_are_lines_of_their_own() -> None:
    scene = Scene("key")
    scene.broker.fail_next("results", E.NOT_ENOUGH_REPLICAS, times=1)
    scene.send("r0", key=b"a")
    scene.serve()
    scene.send("r1", key=b"b")
    scene.send("r2", key=b"a")
    assert scene.arrived == ["r1"]
    scene.serve_until_closed()
    assert scene.arrived == ["r1", "r0", "r2"]


def test_a_full_queue_of_the_producer_lets_nobody_overtake() -> None:
    scene = Scene("partition")
    produce, full = scene.producer.produce, [True, True]

    def sometimes_full(*arguments: Any, **named: Any) -> None:
        if full:
            full.pop()
            raise BufferError
        produce(*arguments, **named)

    scene.producer.produce = sometimes_full  # type: ignore[method-assign]
    scene.send("r0", "r1", "r2")
    assert scene.arrived == []
    scene.serve_until_closed()
    assert scene.arrived == ["r0", "r1", "r2"]


def test_results_that_were_refused_as_too_large_a_batch_go_one_by_one_in_their_order() -> None:
    scene = Scene("partition")
    scene.broker.fail_next("results", E.MSG_SIZE_TOO_LARGE, times=4)
    scene.send("r0", "r1", "r2", "r3")
    scene.serve()
    produce, on_the_way = scene.producer.produce, []

    def counted(*arguments: Any, **named: Any) -> None:
        on_the_way.append(len(scene.producer._reports))
        produce(*arguments, **named)

    scene.producer.produce = counted  # type: ignore[method-assign]
    scene.serve_until_closed()
    assert on_the_way == [0, 0, 0, 0]
    assert scene.arrived == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("ordering", ["none", "partition", "key"])
def test_what_waits_for_a_partition_that_was_taken_away_is_dropped(ordering: Ordering) -> None:
    scene = Scene(ordering)
    scene.broker.fail_next("results", E.NOT_ENOUGH_REPLICAS, times=3)
    scene.send("r0", partition=0)
    scene.send("r1", "r2", partition=1)
    scene.serve()
    assert scene.arrived == []
    dropped = scene.outbox.forget([Partition("requests", 1)])
    assert sorted(one.id for one in dropped) == ["r1", "r2"]
    assert scene.outbox.unacknowledged == 1
    scene.serve_until_closed()
    assert scene.arrived == ["r0"]


@pytest.mark.parametrize("ordering", ["none", "partition", "key"])
def test_what_is_refused_after_its_partition_was_taken_away_is_not_sent_again(ordering: Ordering) -> None:
    """The simulation found it: the next owner had answered, and the result came a second time."""
    scene = Scene(ordering)
    scene.broker.fail_next("results", E.NOT_ENOUGH_REPLICAS, times=2)
    scene.send("r0", "r1", partition=0)
    scene.send("r2", partition=1)
    assert scene.outbox.forget([Partition("requests", 0)]) == []  # the client has them
    scene.outbox.keeps = lambda record: record.partition != 0
    scene.serve_until_closed()
    assert scene.arrived == ["r2"]
    scene.outbox.keeps = lambda record: True
    scene.send("r3", partition=0)
    scene.serve_until_closed()
    assert scene.arrived == ["r2", "r3"]
    assert [one.id for one in scene.closed] == ["r2", "r3"]


@settings(deadline=None)
@given(st.data())
def test_whatever_is_refused_the_order_of_each_line_is_kept_and_nothing_is_lost(data: st.DataObject) -> None:
    """A broker that refuses one, refuses all that were sent together with it, as it does for want of a right.

    What was sent before that refusal was known may have arrived already: that is the bound of `at_least_once`.
    """
    scene = Scene("partition")
    number = 0
    for _ in range(data.draw(st.integers(1, 12))):
        scene.broker.topics["results"].fail.clear()
        together = data.draw(st.integers(0, 4))
        if data.draw(st.booleans()):
            scene.broker.fail_next("results", E.TOPIC_AUTHORIZATION_FAILED, times=50)
        for _ in range(together):
            scene.send(f"r{number}", partition=number % 2)
            number += 1
        scene.serve(data.draw(st.sampled_from([0.0, 0.05, 1.0])))
        scene.serve()
    scene.broker.topics["results"].fail.clear()
    scene.serve_until_closed()
    for parity in (0, 1):
        line = [int(name[1:]) for name in scene.arrived if int(name[1:]) % 2 == parity]
        assert line == sorted(line)
    assert len(scene.arrived) == len(scene.closed) == number
