"""Where a tail starts: what a broker says while a partition's leader settles is asked again, not told."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from forebay.errors import KafkaUnavailableError
from forebay.settings import Kafka
from forebay.stream import tail
from forebay.stream.tail import Tail


class Settling:
    """A consumer whose broker fails so often before it tells offsets."""

    def __init__(self, code: int, times: int) -> None:
        self._error = KafkaException(KafkaError(code))
        self._times = times

    def offsets_for_times(self, asked: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        if self._times:
            self._times -= 1
            raise self._error
        return [TopicPartition(at.topic, at.partition, 7) for at in asked]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail.time, "sleep", lambda _: None)


def positioned(code: int, times: int) -> list[int]:
    opened = Tail(Kafka(), [])
    opened._consumer = Settling(code, times)  # type: ignore[assignment]
    return [at.offset for at in opened._positioned([TopicPartition("t", 0)], "end", time.monotonic() + 60)]


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.FENCED_LEADER_EPOCH,
    ],
)
def test_a_leader_that_settles_is_asked_again(code: int) -> None:
    """A client failed once in 200 on a topic that had just been made: its leader did not know the epoch yet."""
    assert positioned(code, 3) == [7]


def test_a_refusal_is_told_at_once() -> None:
    with pytest.raises(KafkaUnavailableError, match="does not tell offsets"):
        positioned(KafkaError.TOPIC_AUTHORIZATION_FAILED, 1)
