"""A member of a share group over scripted clients: how waves are taken, told and given back."""

from __future__ import annotations

from collections import deque
from typing import Any

import confluent_kafka as ck
import pytest

from forebay.errors import ConfigError
from forebay.records import Partition
from forebay.stream.leases import Leased, Leases
from forebay.stream.share_committer import ShareCommitter
from forebay.stream.share_consumer import HANDS, Service, ShareConsumer, Sharing
from forebay.testing import ManualClock
from tests.contract.sides import Notes

TYPES = {ck.AcknowledgeType.ACCEPT: "accept", ck.AcknowledgeType.RELEASE: "release"}


class Message:
    """A message of the client."""

    def __init__(self, offset: int, deliveries: int = 1, error: Any = None) -> None:
        self._offset, self._deliveries, self._error = offset, deliveries, error

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return None

    def value(self) -> bytes | None:
        return b"v"

    def headers(self) -> None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return 1, 2

    def delivery_count(self) -> int:
        return self._deliveries

    def error(self) -> Any:
        return self._error


class Queue:
    """What the group has to lend, and all clients that were made."""

    def __init__(self) -> None:
        self.waves: deque[list[Message]] = deque()
        self.clients: list[Client] = []
        self.failure: Any = None

    def make(self, config: dict[str, Any], **_: Any) -> Client:
        self.clients.append(Client(self, config))
        return self.clients[-1]

    def told(self) -> dict[int, str]:
        """Return what the broker was told about each offset."""
        return {offset: verdict for client in self.clients for offset, verdict in client.sent}

    @property
    def polled(self) -> list[int]:
        return [client.polls for client in self.clients]


class Client:
    """A share consumer that is as strict as the real one about what has to be acknowledged before a poll."""

    def __init__(self, queue: Queue, config: dict[str, Any]) -> None:
        self.queue, self.config = queue, config
        self.lent: set[int] = set()
        self.kept: list[tuple[int, str]] = []
        self.sent: list[tuple[int, str]] = []
        self.polls = 0
        self.closed = False
        self.refusal: Any = None
        self.answers: list[Any] = []
        self.holds_answers = False

    def subscribe(self, topics: list[str]) -> None:
        assert topics == ["t"]

    def set_acknowledgement_commit_callback(self, callback: Any) -> None:
        self.callback = callback

    def poll(self, timeout: float) -> list[Message]:
        self.polls += 1
        if self.lent:
            raise ck.IllegalStateException("records from previous poll have not been acknowledged")
        if self.queue.failure is not None:
            raise ck.KafkaException(self.queue.failure)
        self._send()
        wave = self.queue.waves.popleft() if self.queue.waves else []
        self.lent = {message.offset() for message in wave}
        return wave

    def acknowledge_offset(self, topic: str, partition: int, offset: int, type: Any) -> None:
        if offset not in self.lent:
            raise ck.IllegalStateException("not in flight")
        self.lent.discard(offset)
        self.kept.append((offset, TYPES[type]))

    def commit_async(self) -> None:
        self._send()

    def _send(self) -> None:
        if self.holds_answers and self.answers:
            assert not self.kept, "the client would join these with those on their way"
            return
        for places in self.answers:
            self.callback(places, self.refusal)
        self.answers = [{ck.TopicPartition("t", 0): {offset for offset, _ in self.kept}}] if self.kept else []
        self.sent += self.kept
        self.kept = []

    def close(self) -> None:
        self._send()
        self.closed = True


class Scene:
    """A member, its ledger and its clock, on a queue."""

    def __init__(self, most: int = 12, lock: float = 30.0, limit: int = 5, service: Service | None = None) -> None:
        self.queue, self.clock, self.leases = Queue(), ManualClock(), Leases(3)
        self.fit = True
        sharing = Sharing(lock, limit, lambda: self.fit)
        self.member = ShareConsumer(
            {"group.id": "g"},
            ["t"],
            self.leases,
            sharing,
            most=most,
            service=lambda: service,
            make_client=self.queue.make,
            clock=self.clock,
        )
        self.committer = ShareCommitter(self.member, 0.2)
        self.notes = Notes()

    def start(self) -> Scene:
        self.member.start(self.notes)
        return self

    def lend(self, *offsets: int, deliveries: int = 1) -> None:
        self.queue.waves.append([Message(offset, deliveries) for offset in offsets])

    def take(self, limit: int = 100) -> list[int]:
        return [record.offset for record in self.records(limit)]

    def records(self, limit: int = 100) -> list[Any]:
        records = self.member.receive(limit, 0.0)
        return self.leases.opened_all(records)

    def settle(self, *, idle: bool = False) -> None:
        self.committer.settle(self.clock.advance(0.02), idle=idle)


def test_while_a_wave_is_worked_on_another_client_takes_the_next() -> None:
    scene = Scene().start()
    for wave in ((1, 2), (3, 4), (5, 6), (7, 8)):
        scene.lend(*wave)
    assert [scene.take() for _ in range(5)] == [[1, 2], [3, 4], [5, 6], [], []]
    assert len(scene.queue.clients) == HANDS


def test_a_client_polls_again_only_when_its_whole_wave_is_answered() -> None:
    scene = Scene().start()
    scene.lend(1, 2)
    first, second = scene.records()
    scene.leases.closed_all([first])
    scene.settle(idle=True)
    assert scene.queue.told() == {1: "accept"}
    scene.leases.closed_all([second])
    scene.settle(idle=True)
    assert scene.queue.told() == {1: "accept", 2: "accept"}
    for wave in ((3,), (4,), (5,)):
        scene.lend(*wave)
    assert [scene.take() for _ in range(HANDS)] == [[3], [4], [5]]


def test_acknowledgements_wait_for_the_interval_unless_the_worker_is_idle() -> None:
    scene = Scene().start()
    scene.lend(1, 2, 3)
    records = scene.records()
    scene.settle(idle=True)
    scene.leases.closed_all(records[:1])
    scene.settle(idle=True)
    scene.leases.closed_all(records[1:2])
    scene.settle()
    assert scene.queue.told() == {1: "accept"}
    assert not scene.committer.is_settled
    scene.clock.advance(0.3)
    scene.settle()
    scene.settle()
    assert scene.queue.told() == {1: "accept", 2: "accept"}
    assert scene.committer.is_settled


def test_nothing_is_told_while_an_answer_is_missing() -> None:
    """The client joins such acknowledgements in the order in which they came, and the broker refuses all of them."""
    scene = Scene().start()
    scene.lend(1, 2, 3)
    records = scene.records()
    client = scene.queue.clients[0]
    client.holds_answers = True
    for record in (records[2], records[0], records[1]):
        scene.leases.closed_all([record])
        scene.settle(idle=True)
    assert scene.queue.told() == {3: "accept"}
    client.holds_answers = False
    scene.settle(idle=True)
    scene.settle(idle=True)
    assert scene.queue.told() == {1: "accept", 2: "accept", 3: "accept"}


def test_an_answer_that_never_comes_holds_up_its_client_for_half_a_minute_only() -> None:
    scene = Scene().start()
    scene.lend(1, 2)
    records = scene.records()
    client = scene.queue.clients[0]
    scene.leases.closed_all(records[:1])
    scene.settle(idle=True)
    client.answers = []  # the broker died with it
    scene.leases.closed_all(records[1:])
    scene.settle(idle=True)
    assert scene.queue.told() == {1: "accept"}
    scene.clock.advance(31.0)
    scene.settle(idle=True)
    assert scene.queue.told() == {1: "accept", 2: "accept"}


def test_an_error_event_with_a_place_is_told_so_that_the_client_can_go_on() -> None:
    scene = Scene().start()
    scene.queue.waves.append([Message(1, error=ck.KafkaError(ck.KafkaError._KEY_DESERIALIZATION, "odd"))])
    assert scene.take() == []
    scene.settle(idle=True)
    assert scene.queue.told() == {1: "release"}
    assert [event.name for event in scene.member.events] == ["_KEY_DESERIALIZATION"]


def test_a_refused_acknowledgement_is_told_and_not_repeated() -> None:
    scene = Scene().start()
    scene.lend(1)
    scene.leases.closed_all(scene.records())
    scene.queue.clients[0].refusal = ck.KafkaException(ck.KafkaError(ck.KafkaError.INVALID_RECORD_STATE))
    scene.settle(idle=True)
    answers = scene.committer.settle(scene.clock.advance(1.0), idle=True)
    assert answers == [({}, {Partition("t", 0): "INVALID_RECORD_STATE"})]
    assert scene.committer.is_settled


def test_what_a_poll_returns_beyond_the_room_waits_and_nothing_more_is_taken() -> None:
    scene = Scene().start()
    scene.lend(*range(10))
    scene.lend(10)
    assert scene.take(4) == [0, 1, 2, 3]
    assert scene.take(4) == [4, 5, 6, 7]
    assert scene.take(4) == [8, 9]
    assert scene.take(4) == [10]


def test_what_waited_unread_for_half_of_its_lock_is_given_back() -> None:
    scene = Scene(lock=30.0).start()
    scene.lend(1, 2, 3)
    assert scene.take(1) == [1]
    scene.clock.advance(16.0)
    assert scene.take(1) == []
    scene.settle(idle=True)
    assert scene.queue.told() == {2: "release", 3: "release"}
    assert [event.name for event in scene.member.events] == ["FOREBAY_LOCK_RUNS_OUT"]


def test_nothing_is_taken_while_an_older_wave_is_slow() -> None:
    scene = Scene(lock=30.0).start()
    scene.lend(1)
    slow = scene.records()
    scene.lend(2)
    scene.clock.advance(11.0)
    assert scene.take() == []
    scene.leases.closed_all(slow)
    scene.settle(idle=True)
    assert scene.take() == [2]


def test_a_worker_that_cannot_answer_takes_nothing() -> None:
    scene = Scene().start()
    scene.fit = False
    scene.lend(1)
    assert scene.take() == []
    assert scene.queue.polled == [0, 0, 0]
    scene.fit = True
    assert scene.take() == [1]


def test_a_client_that_is_asking_is_polled_whatever_happens_because_it_locks_what_comes() -> None:
    scene = Scene(lock=30.0).start()
    assert scene.take() == []
    scene.fit = False
    scene.lend(1)
    assert scene.take() == [1]
    assert scene.leases.oldest() == 1000.0


def test_a_paused_member_asks_for_nothing() -> None:
    scene = Scene().start()
    scene.lend(1)
    scene.member.pause()
    assert scene.take() == []
    scene.member.resume()
    assert scene.take() == [1]


def test_leaving_gives_back_what_is_not_answered_and_keeps_what_is() -> None:
    scene = Scene().start()
    scene.lend(1, 2, 3)
    scene.lend(4)
    first, _ = scene.records(2)
    scene.leases.closed_all([first])
    scene.member.close()
    assert scene.queue.told() == {1: "accept", 2: "release", 3: "release"}
    assert all(client.closed for client in scene.queue.clients)


def test_the_last_delivery_that_the_group_allows_is_marked() -> None:
    scene = Scene(limit=5).start()
    scene.lend(1, deliveries=4)
    scene.lend(2, deliveries=5)
    found = [*scene.records(), *scene.records()]
    assert [(record.deliveries, record.is_last) for record in found if isinstance(record, Leased)] == [
        (4, False),
        (5, True),
    ]


def test_a_record_that_cannot_be_read_comes_without_a_value_and_is_accepted_when_answered() -> None:
    scene = Scene().start()
    broken = ck.KafkaError(ck.KafkaError._BAD_COMPRESSION, "a bomb")
    scene.queue.waves.append([Message(1), Message(2, error=broken)])
    good, bad = scene.records()
    assert (bad.offset, bad.value) == (2, None)
    scene.leases.closed_all([good, bad])
    scene.settle(idle=True)
    assert scene.queue.told() == {1: "accept", 2: "accept"}


def test_the_waves_are_as_large_as_the_replicas_can_serve_within_a_third_of_the_lock() -> None:
    assert Scene(most=300, service=None).start().member.wave_size == 100
    assert Scene(most=300, service=Service(1_000.0, 0.1)).start().member.wave_size == 100
    assert Scene(most=300, lock=30.0, service=Service(3.0, 0.1)).start().member.wave_size == 10
    assert Scene(most=300, lock=30.0, service=Service(0.1, 9.0)).start().member.wave_size == 1


def test_a_batch_that_takes_more_than_a_third_of_the_lock_stops_the_start_with_the_mend() -> None:
    with pytest.raises(ConfigError, match=r"one batch takes 11\.0 s, and the group's locks last 30 s.*max_batch_size"):
        Scene(lock=30.0, service=Service(1.0, 11.0)).start()


def test_a_consumer_group_of_the_same_name_stops_the_worker_with_a_sentence() -> None:
    scene = Scene().start()
    scene.queue.failure = ck.KafkaError(ck.KafkaError.GROUP_ID_NOT_FOUND)
    with pytest.raises(ConfigError, match=r"g is no share group .* choose a kafka.group_id"):
        scene.take()


def test_a_passing_error_of_the_client_is_an_event() -> None:
    scene = Scene().start()
    scene.queue.failure = ck.KafkaError(ck.KafkaError._TRANSPORT, "gone")
    assert scene.take() == []
    assert [event.name for event in scene.member.events] == ["_TRANSPORT"]


def test_the_listener_hears_once_that_the_member_has_partitions() -> None:
    scene = Scene().start()
    stats = scene.queue.clients[0].config["stats_cb"]
    stats('{"cgrp": {"assignment_size": 0}}')
    scene.take()
    assert scene.notes.told == []
    stats('{"cgrp": {"assignment_size": 2}}')
    scene.take()
    scene.take()
    assert scene.notes.told == [("assigned", [])]
