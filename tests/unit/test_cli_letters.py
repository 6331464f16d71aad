"""Dead letters: what they say, which are meant, and the request inside, byte for byte."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from forebay.cli.letters import Letter, Selection, oldest, parse_time, show_time
from forebay.cli.replaying import Replayed, eligible
from forebay.errors import UsageError
from forebay.records import Headers, Record

OWN: Headers = [("model", b"m"), ("kafka_correlationId", b"\xff\x00"), ("empty", None), ("model", b"second")]
ADDED: Headers = [
    ("kafka_dlt-original-topic", b"requests"),
    ("kafka_dlt-original-partition", b"\x00\x00\x00\x02"),
    ("kafka_dlt-original-offset", (41).to_bytes(8, "big")),
    ("kafka_dlt-original-timestamp", (5).to_bytes(8, "big")),
    ("kafka_dlt-original-consumer-group", b"g"),
    ("kafka_dlt-exception-fqcn", b"forebay.model_error"),
    ("kafka_dlt-exception-message", b"it broke"),
    ("forebay-error-code", b"model_error"),
    ("forebay-attempts", b"3"),
]


def letter(headers: Headers, *, at: int = 1000, key: bytes | None = b"id", offset: int = 0) -> Letter:
    return Letter(Record("dead", 0, offset, key, b"value", headers, at))


def test_a_letter_tells_what_happened() -> None:
    one = letter(OWN + ADDED)
    assert (one.id, one.code, one.message, one.model) == ("id", "model_error", "it broke", "m")
    assert (one.origin, one.topic, one.attempts, one.replays) == ("requests/2/41", "requests", 3, 0)


def test_the_requests_own_headers_come_out_byte_for_byte_with_the_replay_counted() -> None:
    assert letter(OWN + ADDED).request_headers() == [*OWN, ("forebay-replays", b"1")]


def test_a_replay_is_counted_on() -> None:
    again = letter([*OWN, ("forebay-replays", b"1"), *ADDED])
    assert again.replays == 1
    assert again.request_headers() == [*OWN, ("forebay-replays", b"2")]


def test_dead_letter_headers_that_the_request_came_with_stay() -> None:
    theirs: Headers = [("kafka_dlt-original-topic", b"elsewhere"), ("kafka_dlt-original-offset", b"9")]
    one = letter(theirs + OWN + ADDED)
    assert one.topic == "requests"
    assert one.request_headers() == [*theirs, *OWN, ("forebay-replays", b"1")]


def test_a_letter_of_someone_else_has_no_topic_to_go_back_to() -> None:
    stray = letter([], key=None)
    assert (stray.topic, stray.code, stray.id) == (None, "?", "?/?/?")
    done = Replayed()
    assert list(eligible(iter([stray]), None, 3, done)) == []
    assert done.homeless == 1


@pytest.mark.parametrize(
    ("selection", "taken"),
    [
        (Selection(), True),
        (Selection(codes=["model_error", "poisoned"]), True),
        (Selection(codes=["poisoned"]), False),
        (Selection(models=["m"]), True),
        (Selection(models=["x"]), False),
        (Selection(ids=["id"]), True),
        (Selection(ids=["other"]), False),
        (Selection(since_ms=1000, until_ms=1001), True),
        (Selection(since_ms=1001), False),
        (Selection(until_ms=1000), False),
    ],
)
def test_letters_are_selected_by_code_model_id_and_time(selection: Selection, taken: bool) -> None:
    assert selection.takes(letter(OWN + ADDED)) is taken


def test_an_unknown_code_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown error code oops; one of deadline_exceeded, internal"):
        Selection(codes=["oops"])


def test_requests_that_were_replayed_often_enough_are_left_out() -> None:
    letters = [letter([("forebay-replays", str(count).encode()), *ADDED]) for count in range(5)]
    done = Replayed()
    assert [one.replays for one, _ in eligible(iter(letters), None, 3, done)] == [0, 1, 2]
    assert (done.exhausted, done.topics) == (2, {"requests": 3})


def test_a_limit_stops_the_replay() -> None:
    done = Replayed()
    assert len(list(eligible((letter(ADDED, at=at) for at in range(10)), 4, 3, done))) == 4
    assert done.newest_ms == 3


def test_times_are_ages_or_iso() -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    assert parse_time("2h", now) == int((now.timestamp() - 7200) * 1000)
    assert parse_time("2026-01-01T00:00:00+00:00", now) == int((now.timestamp() - 86_400) * 1000)
    assert parse_time(None, now) is None
    assert parse_time(show_time(1_796_030_463_217), now) == 1_796_030_463_217
    with pytest.raises(UsageError, match="'yesterday' is no time"):
        parse_time("yesterday", now)


def placed(partition: int, offset: int, at: int) -> Letter:
    return Letter(Record("dead", partition, offset, b"%d/%d" % (partition, offset), b"value", [*ADDED], at))


READ = [placed(1, 0, 30), placed(1, 1, 31), placed(0, 0, 10), placed(0, 1, 31), placed(0, 2, 31), placed(2, 0, 20)]
"""As a topic is read: partition by partition."""


def test_letters_are_listed_by_time_over_all_partitions() -> None:
    """They came partition by partition, in an order of the client's own."""
    listed, total = oldest(READ, None)
    assert [one["place"] for one in listed] == ["0/0", "2/0", "1/0", "0/1", "0/2", "1/1"]
    assert [one["place"] for one in oldest(READ, 2)[0]] == ["0/0", "2/0"]
    assert total == oldest(READ, 2)[1] == 6


@pytest.mark.parametrize(
    ("limit", "sent", "cut_short"),
    [(2, ["0/0", "2/0"], False), (3, ["0/0", "2/0", "1/0"], False), (4, ["0/0", "2/0", "1/0", "0/1"], True)],
)
def test_a_limited_replay_takes_the_oldest_so_that_the_next_passes_over_none(
    limit: int, sent: list[str], cut_short: bool
) -> None:
    """It took the first that were read, and the `--since` for the next replay left older ones of other partitions."""
    done = Replayed()
    assert [one.place for one, _ in eligible(iter(READ), limit, 3, done)] == sent
    assert done.cut_short is cut_short
    left = [one for one in READ if one.place not in sent]
    since = (done.newest_ms or 0) + (0 if done.cut_short else 1)
    assert all(one.record.timestamp_ms >= since for one in left)
