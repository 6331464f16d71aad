"""`forebay results` while it follows: what it shows, when it ends, and what it says of brokers that are gone."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from confluent_kafka import KafkaError

from forebay.cli.results import follow
from forebay.records import Record
from forebay.settings import Kafka
from forebay.stream.tail import Tail
from forebay.wire import build_result

DOWN = KafkaError(KafkaError._ALL_BROKERS_DOWN)
REFUSED = KafkaError(
    KafkaError._TRANSPORT, "h:1/1: Connect to ipv4#127.0.0.1:1 failed: Connection refused (after 0ms in state UP)"
)


class Scripted(Tail):
    """A tail whose reads are written down: records, or what the client complains about meanwhile."""

    def __init__(self, *reads: Any) -> None:
        super().__init__(Kafka(), [])
        self._reads = deque(reads)

    def read(self, limit: int = 1000, wait: float = 0.1) -> list[Record]:
        found = self._reads.popleft()
        self._errors += [one for one in found if isinstance(one, KafkaError)]
        return [one for one in found if isinstance(one, Record)]

    @property
    def at_end(self) -> bool:
        return not self._reads


def outcome(number: int) -> Record:
    value, headers = build_result({"y": [1.0]}, id=f"r{number}", model="m")
    return Record("out", 0, number, f"r{number}".encode(), value, headers, 0)


def test_an_outage_is_told_once_until_records_come_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The screen stood still, and nobody knew that no broker was there any more."""
    tail = Scripted([outcome(1)], [REFUSED, DOWN], [], [REFUSED, DOWN], [outcome(2)], [REFUSED, DOWN], [])
    assert follow(tail, [], None, True, None, False) == 2
    told = capsys.readouterr()
    assert told.err == "no broker answers (connection refused): waiting for one\n" * 2
    assert [line.split()[0] for line in told.out.splitlines()] == ["r1", "r2"]


def test_one_broker_that_is_gone_is_no_outage(capsys: pytest.CaptureFixture[str]) -> None:
    assert follow(Scripted([REFUSED], [outcome(1)]), [], None, True, None, False) == 1
    assert capsys.readouterr().err == ""
