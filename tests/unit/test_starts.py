"""Where a consumer begins, and where it goes on when its position is not in the log: on a client of paper."""

from __future__ import annotations

import re
from typing import Any

import confluent_kafka as ck
import pytest

from forebay.errors import NoStartError
from forebay.records import Partition
from forebay.stream.member import Event
from forebay.stream.starts import StartRule, Starts

A, B, C, D = (Partition("requests", number) for number in range(4))
OUT_OF_RANGE = (
    "fetch failed due to requested offset not available on the broker: Broker: Offset out of range (broker 1)"
)
NO_OFFSET = "no previously committed offset available: Local: No offset stored"


class PaperClient:
    """A client whose partitions all hold offsets 100 to 199; the group has committed what a test says."""

    def __init__(self, **committed: int) -> None:
        self.logs = dict.fromkeys((A, B, C, D), (100, 200))
        self.commits = {Partition("requests", "abcd".index(name)): mark for name, mark in committed.items()}
        self.assigned: list[Partition] = [*self.commits] or [A]
        self.positions: dict[Partition, int] = {}
        self.silent: set[Partition] = set()
        self.coordinator_answers = True
        self.moves: list[tuple[str, dict[Partition, int]]] = []

    def assignment(self) -> list[Any]:
        return [ck.TopicPartition(*partition) for partition in self.assigned]

    def position(self, asked: list[Any]) -> list[Any]:
        return [self._place(p, self.positions.get(Partition(p.topic, p.partition), -1001)) for p in asked]

    def committed(self, asked: list[Any], timeout: float) -> list[Any]:
        if not self.coordinator_answers:
            raise ck.KafkaException(ck.KafkaError(ck.KafkaError._TIMED_OUT))
        return [self._place(p, self.commits.get(Partition(p.topic, p.partition), -1001)) for p in asked]

    def offsets_for_times(self, asked: list[Any], timeout: float) -> list[Any]:
        answered = [p for p in asked if Partition(p.topic, p.partition) not in self.silent]
        return [
            self._place(p, self.logs[Partition(p.topic, p.partition)][0 if p.offset == -2 else 1]) for p in answered
        ]

    def incremental_unassign(self, places: list[Any]) -> None:
        self.moves.append(("out", {Partition(p.topic, p.partition): 0 for p in places}))

    def incremental_assign(self, places: list[Any]) -> None:
        self.moves.append(("in", {Partition(p.topic, p.partition): p.offset for p in places}))
        for place in places:
            self.positions.pop(Partition(place.topic, place.partition), None)

    @property
    def moved(self) -> dict[Partition, int]:
        """Where partitions were put in again last."""
        (out, taken), (put, placed) = self.moves[-2:]
        assert (out, put, taken.keys()) == ("out", "in", placed.keys())
        return placed

    @staticmethod
    def _place(asked: Any, offset: int) -> Any:
        return ck.TopicPartition(asked.topic, asked.partition, offset)


def made(client: PaperClient, events: list[Event] | None = None, **rule: Any) -> Starts:
    """Return the starts of a consumer whose partitions were assigned with their committed offsets."""
    config = {"group.id": "a-group", "bootstrap.servers": "a-host:9092"}
    starts = Starts(StartRule(**rule), config, [].append if events is None else events.append)
    starts.client = client
    asked = [ck.TopicPartition(*partition) for partition in client.assigned]
    starts.begin(dict(zip(client.assigned, client.committed(asked, 1.0), strict=True)))
    return starts


def strayed(starts: Starts, *partitions: Partition, said: str = OUT_OF_RANGE) -> Starts:
    starts.astray.update(dict.fromkeys(partitions, said))
    return starts


def begun(starts: Starts, **committed: int | None) -> dict[Partition, int]:
    known = {Partition("requests", "abcd".index(name)): mark for name, mark in committed.items()}
    places = {p: None if mark is None else ck.TopicPartition(*p, mark) for p, mark in known.items()}
    return {Partition(place.topic, place.partition): place.offset for place in starts.begin(places)}


@pytest.mark.parametrize(("rule", "start"), [("earliest", ck.OFFSET_BEGINNING), ("latest", 200)])
def test_partitions_begin_at_their_committed_offset_and_without_one_as_the_rule_says(rule: Any, start: int) -> None:
    starts = made(PaperClient(), no_offset=rule)
    assert begun(starts, a=7, b=-1001) == {A: 7, B: start}
    assert (starts.without_commit(B), starts.without_commit(C)) == (start, -2 if rule == "earliest" else -1)


def test_without_an_offset_and_without_a_rule_there_is_no_start() -> None:
    with pytest.raises(NoStartError, match=r"requests \[1\] has no offset to start from; set kafka.auto_offset_reset"):
        begun(made(PaperClient(a=1), no_offset="error"), a=7, b=-1001)


def test_where_nobody_says_what_is_committed_the_client_asks_by_itself() -> None:
    starts = made(PaperClient(a=1), no_offset="error")
    assert begun(starts, a=None) == {A: ck.OFFSET_INVALID}


def test_an_end_that_nobody_tells_is_left_to_the_client() -> None:
    client = PaperClient()
    client.silent = {B}
    assert begun(made(client, no_offset="latest"), b=-1001) == {B: ck.OFFSET_END}


def test_deleted_requests_stop_the_consumer_once_with_numbers_and_both_mends() -> None:
    client = PaperClient(a=40, b=150)
    starts = strayed(made(client), A)
    with pytest.raises(NoStartError) as stopped:
        starts.find(0.0)
    assert str(stopped.value) == (
        "requests [0]: the group stands at offset 40, the first that is still there is 100: up to 60 requests deleted "
        "before an answer. To go on without them set kafka.offset_out_of_range to skip, or, while no worker of the "
        "group runs: kafka-consumer-groups.sh --bootstrap-server a-host:9092 --group a-group --topic requests:0 "
        "--reset-offsets --to-earliest --execute"
    )
    strayed(starts, B).find(9.0)
    assert client.moves == []


def test_the_sentence_counts_all_partitions_of_the_worker_and_names_some() -> None:
    starts = strayed(made(PaperClient(a=90, b=99, c=50, d=0)), C)
    with pytest.raises(NoStartError) as stopped:
        starts.find(0.0)
    told = str(stopped.value)
    assert re.findall(r"requests \[(\d)\]", told) == ["0", "1", "2"]
    assert "up to 1 request deleted" in told
    assert "and so on in 4 partitions, up to 161 requests in all" in told
    assert "--topic requests:0,1,2,3 " in told


def test_what_is_skipped_is_counted_by_partition_and_once() -> None:
    events: list[Event] = []
    client = PaperClient(a=40, b=60, c=150)
    starts = strayed(made(client, events, out_of_range="skip"), A, B)
    starts.find(0.0)
    assert client.moved == {A: 100, B: 100}
    assert [(e.partition, e.offset, e.skipped) for e in events] == [(A, 100, 60), (B, 100, 40)]
    strayed(starts, A).find(5.0)  # the client says it again
    assert [e.skipped for e in events] == [60, 40]
    client.logs[A] = (110, 200)  # deleting went on before the first of it was read
    strayed(starts, A).find(9.0)
    assert client.moved == {A: 110}
    assert [e.skipped for e in events] == [60, 40, 10]


def test_what_was_read_is_not_counted_nor_what_the_group_has_finished() -> None:
    """While it runs the position counts; where it reads the past again, for duplicates, the commit does."""
    events: list[Event] = []
    client = PaperClient(a=20, b=130)
    starts = made(client, events, out_of_range="skip")
    client.positions[A] = 90
    starts.sought(B, 70)
    strayed(starts, A, B).find(0.0)
    assert client.moved == {A: 100, B: 100}
    assert [(e.partition, e.skipped) for e in events] == [(A, 10)]


def test_reading_the_past_again_stops_nobody_where_it_was_deleted() -> None:
    client = PaperClient(a=130)
    starts = made(client)
    starts.sought(A, 70)
    strayed(starts, A).find(0.0)
    assert client.moved == {A: 100}


@pytest.mark.parametrize(("rule", "start"), [("earliest", ck.OFFSET_BEGINNING), ("latest", 200)])
def test_an_offset_behind_the_end_is_none_and_is_told(rule: Any, start: int) -> None:
    events: list[Event] = []
    client = PaperClient(a=900)
    strayed(made(client, events, no_offset=rule), A).find(0.0)
    assert client.moved == {A: start}
    assert [(e.name, e.skipped) for e in events] == [("FOREBAY_BEHIND_THE_END", 0)]
    assert "requests [0] ends at 200, before offset 900 of the group" in events[0].message


def test_a_log_that_was_cut_is_read_on_from_the_cut() -> None:
    events: list[Event] = []
    client = PaperClient(a=120)
    starts = made(client, events)
    client.positions[A] = 180
    said = "Partition log truncation detected at offset 180 (leader epoch 3): broker end offset is 160 (offset leader"
    strayed(starts, A, said=said).find(0.0)
    assert client.moved == {A: 160}
    assert [e.name for e in events] == ["FOREBAY_LOG_CUT"]


def test_what_is_over_when_it_is_looked_at_changes_no_position() -> None:
    client = PaperClient(a=120)
    starts = made(client)
    client.positions[A] = 140
    strayed(starts, A).find(0.0)
    assert client.moved == {A: 140}


def test_a_place_that_the_client_could_not_ask_for_is_asked_for_again() -> None:
    client = PaperClient(a=-1001)
    strayed(made(client), A, said="failed to query logical offset").find(0.0)
    assert client.moved == {A: ck.OFFSET_BEGINNING}


def test_a_partition_whose_offset_the_client_asked_for_itself_begins_by_the_rule() -> None:
    client = PaperClient(a=-1001)
    starts = made(client)
    begun(starts, a=None)
    strayed(starts, A, said=NO_OFFSET).find(0.0)
    assert client.moved == {A: ck.OFFSET_BEGINNING}


def test_an_offset_that_came_meanwhile_counts() -> None:
    client = PaperClient(a=-1001)
    starts = made(client)
    begun(starts, a=None)
    client.commits[A] = 120
    strayed(starts, A, said=NO_OFFSET).find(0.0)
    assert client.moved == {A: 120}


def test_what_brokers_do_not_answer_for_is_looked_at_again_after_a_pause() -> None:
    client = PaperClient(a=40, b=50)
    starts = strayed(made(client, out_of_range="skip"), A, B)
    client.coordinator_answers = False
    starts.find(0.0)
    assert client.moves == []
    client.coordinator_answers, client.silent = True, {B}
    starts.find(0.5)
    assert client.moves == []
    starts.find(1.0)
    assert client.moved == {A: 100}
    assert starts.astray.keys() == {B}
    client.silent = set()
    starts.find(2.0)
    assert client.moved == {B: 100}
    assert not starts.astray


def test_partitions_that_are_given_back_are_nobody_s_concern() -> None:
    client = PaperClient(a=40, b=40)
    starts = strayed(made(client), A, B)
    starts.forget([A])
    client.assigned = []
    starts.find(0.0)
    assert not starts.astray
    assert client.moves == []
