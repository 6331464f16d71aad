"""What leaves through the outbox, on the in-memory double and on real Kafka."""

from __future__ import annotations

import time
from typing import Any

from forebay.records import Code, Failure, Outcome, Record, Signature
from forebay.stream.codec import Refusal
from forebay.stream.outbox import Outbox
from forebay.stream.results import Encoder
from tests.contract.sides import Side
from tests.kafka_probe import Read


def encoder(side: Side, output_topic: str | None = None) -> Encoder:
    return Encoder([Signature("double", "1", (), ())], output_topic or side.results, "group")


def record(side: Side, number: int) -> Record:
    return Record(side.requests, 0, number, b"key-%d" % number, b"value-%d" % number, [("h", b"%d" % number)], 1_000)


def result(side: Side, number: int, **changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "record": record(side, number),
        "id": f"é-{number}",
        "topic": side.results,
        "partition": None,
        "value": b"result-%d" % number,
        "headers": [("status", b"ok"), ("none", None)],
        "model": "double",
        "arrived": 0.0,
        "echo": [],
    }
    return Outcome(**{**values, **changes})


def error(side: Side, number: int, code: Code = Code.INVALID_PAYLOAD) -> Outcome:
    failure = Failure(code, "it is wrong")
    return encoder(side).error(Refusal(record(side, number), f"é-{number}", "double", failure, 0.0), failure)


def sent(side: Side, *outcomes: Outcome) -> Outbox:
    """Send outcomes and wait until all are acknowledged."""
    outbox = side.outbox(encoder(side))
    outbox.start()
    for outcome in outcomes:
        outbox.send(outcome, 0.0)
    closed: list[Outcome] = []
    deadline = time.monotonic() + 30
    began = time.monotonic()
    while len(closed) < len(outcomes):
        assert time.monotonic() < deadline, f"{len(closed)} of {len(outcomes)} are acknowledged; {outbox.trouble}"
        closed += outbox.serve(time.monotonic() - began, 0.01)
    assert {id(outcome) for outcome in closed} == {id(outcome) for outcome in outcomes}
    assert outbox.unacknowledged == 0
    outbox.close()
    return outbox


def by_key(side: Side, topic: str) -> dict[str, Read]:
    found = side.read(topic)
    keyed = {(entry.key or b"").decode(): entry for entry in found}
    assert len(keyed) == len(found)
    return keyed


def test_results_arrive_with_key_value_and_headers_and_close_once(side: Side) -> None:
    sent(side, *[result(side, number) for number in range(500)])
    found = by_key(side, side.results)
    assert found.keys() == {f"é-{number}" for number in range(500)}
    for number in range(500):
        entry = found[f"é-{number}"]
        assert entry.value == b"result-%d" % number
        assert entry.headers == [("status", b"ok"), ("none", None)]
    assert side.read(side.dead) == []


def test_a_result_goes_to_the_partition_that_was_asked_for(side: Side) -> None:
    sent(side, *[result(side, number, partition=1) for number in range(10)])
    assert {entry.partition for entry in side.read(side.results)} == {1}


def test_a_partition_that_does_not_exist_is_replaced_by_any(side: Side) -> None:
    sent(side, result(side, 1, partition=77))
    assert len(side.read(side.results)) == 1


def test_an_error_is_closed_only_with_its_dead_letter(side: Side) -> None:
    outbox = sent(side, error(side, 1), result(side, 2), error(side, 3, Code.DEADLINE_EXCEEDED))
    assert by_key(side, side.results).keys() == {"é-1", "é-2", "é-3"}
    [letter] = side.read(side.dead)
    assert (letter.key, letter.value) == (b"key-1", b"value-1")
    assert letter.headers[0] == ("h", b"1")
    assert letter.header("forebay-error-code") == b"invalid_payload"
    assert letter.header("kafka_dlt-original-offset") == (1).to_bytes(8, "big")
    assert outbox.dead_letters == ["invalid_payload"]


def test_a_result_that_is_too_large_is_replaced_and_its_neighbours_are_not(side: Side) -> None:
    large = result(side, 1, value=b"x" * 30_000)
    sent(side, *[result(side, number) for number in range(2, 20)], large)
    found = by_key(side, side.results)
    assert found.keys() == {f"é-{number}" for number in range(1, 20)}
    assert found["é-1"].header("error-code") == b"result_too_large"
    assert {entry.header("status") for key, entry in found.items() if key != "é-1"} == {b"ok"}
    [letter] = side.read(side.dead)
    assert letter.key == b"key-1"


def test_what_cannot_be_sent_stays_open_and_says_why(side: Side) -> None:
    outbox = side.outbox(encoder(side, "no-such-topic"))
    outbox.start()
    outbox.send(result(side, 1, topic="no-such-topic"), 0.0)
    outbox.send(result(side, 2), 0.0)
    closed: list[Outcome] = []
    deadline, began = time.monotonic() + 30, time.monotonic()
    while not closed or outbox.trouble is None:
        assert time.monotonic() < deadline, f"no trouble was told; {len(closed)} closed"
        closed += outbox.serve(time.monotonic() - began, 0.01)
    outbox.close()
    assert [outcome.id for outcome in closed] == ["é-2"]
    assert "no-such-topic" in outbox.trouble
    assert outbox.unacknowledged == 1


def test_a_reply_topic_that_does_not_exist_turns_the_outcome_back(side: Side) -> None:
    """A caller named it, so it must hold up nobody: the output topic says that the reply could not be written."""
    sent(side, result(side, 1, topic="nobodys-inbox"), result(side, 2))
    found = by_key(side, side.results)
    assert found["é-1"].header("error-code") == b"reply_not_allowed"
    assert b"nobodys-inbox" in (found["é-1"].value or b"")
    assert found["é-2"].header("status") == b"ok"
    [letter] = side.read(side.dead)
    assert letter.key == b"key-1"
