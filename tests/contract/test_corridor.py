"""The whole corridor with its model inline, on the in-memory double and on real Kafka: the same topics come out."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from forebay.records import Partition
from forebay.stream import ahead
from tests.contract.sides import Notes, Side, receive_until, run_to_end
from tests.integration.job import answer, ask, ask_binary, check_answers, check_once, error_code, magic
from tests.kafka_probe import Send
from tests.magic import Magic


def check_committed(side: Side) -> None:
    """Fail unless the group has committed the end of every partition that holds something."""
    ends: dict[tuple[str, int], int] = {}
    for record in side.read(side.requests):
        ends[record.topic, record.partition] = record.offset + 1
    assert ends.items() <= side.committed().items()


@pytest.mark.parametrize("dispatch", ["eager", "linger", "static"])
def test_every_request_has_one_right_answer(side: Side, dispatch: str) -> None:
    counts = {number: 1 if dispatch == "static" else 1 + number % 4 for number in range(120)}
    side.send(ask(n, count) if n % 2 else ask_binary(n, count) for n, count in counts.items())
    run_to_end(side, {"batch.dispatch": dispatch, "batch.max_batch_size": 8})

    outcomes = side.read(side.results)
    check_once(outcomes, map(str, counts))
    check_answers(outcomes, counts)
    check_committed(side)
    assert side.read(side.dead) == []


def test_wrong_requests_have_an_error_and_a_dead_letter_and_right_ones_an_answer(side: Side) -> None:
    wrong = {
        "json": ("invalid_payload", Send(b"{", b"json")),
        "empty": ("invalid_payload", Send(None, b"empty")),
        "model": ("unknown_model", Send(ask(1).value, b"k", [("model", b"nobody"), ("x-request-id", b"model")])),
        "type": ("unsupported_type", Send(b"x", b"type", [("content-type", b"text/csv")])),
        "raise": ("model_error", magic("raise", Magic.RAISE)),
        "nan": ("non_finite_output", magic("nan", Magic.NAN)),
    }
    sends = [ask(n) for n in range(60)]
    for place, (_, send) in enumerate(wrong.values()):
        sends.insert(place * 9 + 4, send)
    side.send(sends)
    run_to_end(side, {"batch.max_batch_size": 16})

    outcomes = side.read(side.results)
    check_once(outcomes, [*map(str, range(60)), *wrong])
    codes = {(o.key or b"").decode(): error_code(o) for o in outcomes if o.header("status") == b"error"}
    assert codes == {id: code for id, (code, _) in wrong.items()}
    check_answers(outcome for outcome in outcomes if (outcome.key or b"").isdigit())
    assert Counter(o.header("source") for o in outcomes) == Counter(r.source.encode() for r in side.read(side.requests))
    assert Counter((letter.key, letter.value) for letter in side.read(side.dead)) == Counter(
        (send.key, send.value) for _, send in wrong.values()
    )
    check_committed(side)


def test_an_expired_request_has_an_error_and_no_dead_letter(side: Side) -> None:
    side.send([ask(1, headers=[("deadline-ms", b"1000")]), ask(2, parameters={"timeout": 3_600_000_000})])
    run_to_end(side, {})
    late, good = sorted(side.read(side.results), key=lambda outcome: outcome.key or b"")
    assert error_code(late) == "deadline_exceeded"
    assert json.loads(late.value or b"")["retriable"] is True
    assert answer(good)[0, 0] == 7
    assert side.read(side.dead) == []
    check_committed(side)


def test_a_reply_goes_where_it_may(side: Side) -> None:
    asked = [("kafka_replyTopic", side.dead.encode()), ("kafka_replyPartition", b"\0\0\0\0")]
    side.send([ask(1, headers=asked), ask(2, headers=[("kafka_replyTopic", b"elsewhere")])])
    run_to_end(side, {"kafka.reply_topics": "dead.*"})
    [error] = side.read(side.results)
    assert (error.key, error_code(error)) == (b"2", "reply_not_allowed")
    replies = [record for record in side.read(side.dead) if record.header("status") == b"ok"]
    assert [reply.key for reply in replies] == [b"1"]


def test_a_second_run_answers_only_what_is_new(side: Side) -> None:
    side.send(ask(n) for n in range(20))
    run_to_end(side, {})
    side.send(ask(n) for n in range(20, 30))
    run_to_end(side, {})
    check_once(side.read(side.results), map(str, range(30)))
    check_committed(side)


def test_a_request_larger_than_a_batch_and_those_beside_it_are_answered(side: Side) -> None:
    counts = {0: 3, 1: 50, 2: 8, 5: 2}
    side.send(ask(n, count) for n, count in counts.items())
    run_to_end(side, {"batch.max_batch_size": 8})
    outcomes = side.read(side.results)
    check_once(outcomes, map(str, counts))
    check_answers(outcomes, counts)


@pytest.mark.parametrize("dispatch", ["linger", "static"])
def test_a_bounded_run_waits_for_nothing_that_is_not_there(side: Side, dispatch: str) -> None:
    """Seen before: a static run with a rest that fills no batch never ended."""
    side.send(ask(n) for n in range(21))
    run_to_end(side, {"batch.dispatch": dispatch, "batch.max_batch_size": 8, "batch.max_wait_ms": 600_000})
    check_once(side.read(side.results), map(str, range(21)))
    check_committed(side)


def test_a_batch_that_is_too_large_for_the_model_is_halved_until_it_fits(side: Side) -> None:
    side.send(ask(n) for n in range(64))
    run_to_end(side, {"batch.max_batch_size": 32, "model.options": {"shy_above": 5}})
    outcomes = side.read(side.results)
    check_once(outcomes, map(str, range(64)))
    check_answers(outcomes)


@pytest.mark.parametrize(
    "text",
    ["checkpoint=12", ahead.write(3, 4, 0, range(4, 50)), ahead.write(0, 1, 12_345, range(1, 50))],
    ids=["foreign", "another offset", "another topic of this name"],
)
def test_a_note_that_does_not_belong_to_these_records_skips_none(side: Side, text: str) -> None:
    place = Partition(side.requests, 0)
    consumer, notes = side.consumer(), Notes()
    consumer.start(notes)
    receive_until(consumer, [], lambda: any(told for _, told in notes.told))
    consumer.commit({place: 0}, {place: text})
    receive_until(consumer, [], lambda: bool(consumer.commits))
    consumer.close()
    side.send(replace(ask(number), partition=0) for number in range(60))

    run_to_end(side, {})

    check_once(side.read(side.results), map(str, range(60)))


def test_a_note_that_belongs_to_these_records_is_believed(side: Side) -> None:
    """The other way round: without it the tests above could not fail."""
    place = Partition(side.requests, 0)
    side.send(replace(ask(number), partition=0, timestamp_ms=1_000 + number) for number in range(60))
    [first] = [record for record in side.read(side.requests) if record.offset == 1]
    consumer, notes = side.consumer(), Notes()
    consumer.start(notes)
    receive_until(consumer, [], lambda: any(told for _, told in notes.told))
    consumer.commit({place: 0}, {place: ahead.write(0, 1, first.timestamp_ms, range(1, 50))})
    receive_until(consumer, [], lambda: bool(consumer.commits))
    consumer.close()

    run_to_end(side, {})

    check_once(side.read(side.results), map(str, [0, *range(50, 60)]))
    check_committed(side)
