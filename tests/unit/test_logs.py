"""What of the Kafka client's own lines reaches the log."""

from __future__ import annotations

import logging

from forebay.logs import Seldom
from forebay.testing import ManualClock


def _line(text: str) -> logging.LogRecord:
    return logging.LogRecord("forebay.kafka", logging.ERROR, "", 0, text, None, None)


def test_a_dead_broker_is_told_once_in_ten_seconds() -> None:
    clock = ManualClock()
    seldom = Seldom(clock)
    told = []
    for _ in range(400):
        told.append(seldom.filter(_line("FAIL [forebay#consumer-1] Connection refused")))
        clock.advance(0.05)
    assert told.count(True) == 2


def test_another_kind_of_line_is_told_at_once() -> None:
    seldom = Seldom(ManualClock())
    assert seldom.filter(_line("FAIL [a] Connection refused"))
    assert seldom.filter(_line("SESSTMOUT [a] Consumer group session timed out"))


def test_what_the_client_tries_again_by_itself_is_not_told() -> None:
    assert not Seldom(ManualClock()).filter(_line("GETPID [a] Coordinator load in progress: retrying"))
