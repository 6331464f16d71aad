"""Batches that the client cannot read: each of their offsets is passed over once, by itself."""

from __future__ import annotations

from typing import Any

import confluent_kafka as ck
import pytest

from forebay.records import Partition, Record
from forebay.stream.codec import UNREADABLE
from forebay.stream.consumer import Consumer
from forebay.stream.unreadable import Unreadable

P = Partition("requests", 0)


def test_a_batch_that_repeats_its_error_is_passed_over_one_offset_after_the_other() -> None:
    unreadable = Unreadable()
    records = [unreadable.pass_over(P, 50, "damaged") for _ in range(3)]
    assert [record.offset for record in records] == [50, 51, 52]
    assert records[0].headers == [(UNREADABLE, b"damaged")]
    assert unreadable.pass_over(P, 70, "damaged").offset == 70
    assert unreadable.pass_over(Partition("requests", 1), 3, "damaged").offset == 3


def test_a_partition_that_is_read_from_somewhere_else_begins_anew() -> None:
    unreadable = Unreadable()
    for _ in range(9):
        unreadable.pass_over(P, 50, "damaged")
    unreadable.forget([P])
    assert unreadable.pass_over(P, 50, "damaged").offset == 50


class Message:
    """What the client gives for a record, or for an error of its partition."""

    def __init__(self, offset: int, error: int | None = None, partition: int = 0) -> None:
        self._offset, self._error, self._partition = offset, error, partition

    def error(self) -> Any:
        return None if self._error is None else ck.KafkaError(self._error, "damaged")

    def topic(self) -> str:
        return "requests"

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def key(self) -> None:
        return None

    def value(self) -> bytes:
        return b"{}"

    def headers(self) -> None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return (1, 0)


class Client:
    """A client that has these messages at hand, and remembers where it was sent."""

    def __init__(self, *waves: list[Message]) -> None:
        self._waves = list(waves)
        self.sought: list[int] = []

    def consume(self, limit: int, wait: float) -> list[Message]:
        return self._waves.pop(0)

    def seek(self, place: Any) -> None:
        self.sought.append(place.offset)


@pytest.mark.parametrize("error", [ck.KafkaError._BAD_COMPRESSION, ck.KafkaError._BAD_MSG])
def test_what_lies_behind_an_unreadable_batch_is_read_after_it_and_once(error: int) -> None:
    """Its first record came without end; and what came with it is fetched again, for the position goes back."""
    consumer = Consumer({}, ["requests"])
    first = [Message(49), Message(50, error), Message(52), Message(7, partition=1)]
    client = Client(first, [Message(50, error)], [Message(52), Message(53)])
    consumer._client = client
    found: list[Record] = [record for _ in range(3) for record in consumer.receive(100, 0.0)]
    assert [(record.partition, record.offset) for record in found] == [
        (0, 49),
        (0, 50),
        (1, 7),
        (0, 51),
        (0, 52),
        (0, 53),
    ]
    assert client.sought == [51, 52]
