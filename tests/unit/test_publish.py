"""Publishing for the tools: what a receipt says of a record that was not taken, and how many of those are told."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from forebay.cli.send import Tally, _tell
from forebay.settings import Kafka
from forebay.stream.publish import Publisher, Receipt


def refused(publisher: Publisher, code: int) -> str:
    receipts: list[Receipt] = []
    publisher._report("t", receipts.append)(KafkaError(code), None)
    assert receipts[0].error is not None
    return receipts[0].error


def test_a_record_that_was_given_up_says_after_how_long_and_why() -> None:
    """It said `Local: Message timed out`, and not what to look at."""
    publisher = Publisher(Kafka(), give_up_after=7)
    assert refused(publisher, KafkaError._MSG_TIMED_OUT) == "no broker took it within 7 s"
    publisher._note(
        KafkaError(
            KafkaError._TRANSPORT, "h:1/1: Connect to ipv4#h:1 failed: Connection refused (after 0ms in state UP)"
        )
    )
    assert refused(publisher, KafkaError._MSG_TIMED_OUT) == "no broker took it within 7 s (connection refused)"
    assert "too large" in refused(publisher, KafkaError.MSG_SIZE_TOO_LARGE).lower()


def test_a_receipts_callback_that_fails_never_reaches_the_kafka_client() -> None:
    def fail(_: Receipt) -> None:
        raise ValueError("no")

    Publisher(Kafka())._report("t", fail)(KafkaError(KafkaError._MSG_TIMED_OUT), None)


def test_of_many_failures_the_first_are_told_and_all_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """A broker that went away while ten thousand requests were sent filled the screen with ten thousand lines."""
    tally = Tally(sent=100, receipts=[(f"r{number}", Receipt("t", -1, -1, "gone")) for number in range(100)])
    _tell(tally, json=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:5] == [f"forebay: request r{number} was not sent: gone" for number in range(5)]
    assert lines[5:] == ["forebay: others were not sent either; --json has a line for each"]
    assert tally.failed == 100
