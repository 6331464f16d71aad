"""Sentences that every command shares: counts, what to do when Kafka or a topic is not there."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from forebay.errors import KafkaUnavailableError
from forebay.stream import admin
from forebay.stream.troubles import (
    CLOSED_AT_ONCE,
    broker_command,
    is_about_tls,
    login_refused,
    plain_cause,
    topic_missing,
    unreachable,
)
from forebay.wording import counted, times


def test_one_is_singular_and_everything_else_plural() -> None:
    assert [counted(n, "replica") for n in (0, 1, 2, 1000)] == [
        "0 replicas",
        "1 replica",
        "2 replicas",
        "1,000 replicas",
    ]
    assert counted(2, "reply", "replies") == "2 replies"
    assert [times(n) for n in (1, 2, 3)] == ["once", "twice", "3 times"]


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "127.0.0.1:9/bootstrap: Connect to ipv4#127.0.0.1:9 failed: Connection refused (after 0ms in state UP)",
            "connection refused",
        ),
        (
            "ssl://h:1/1: Connect to ipv4#1.2.3.4:1 failed: No route to host (after 3ms in state CONNECT, 4 identical "
            "error(s) suppressed)",
            "no route to host",
        ),
        (
            "no.invalid:9/bootstrap: Failed to resolve 'no.invalid:9': Name or service not known",
            "the name does not resolve",
        ),
        (KafkaError(KafkaError._TRANSPORT).str(), "no answer in time"),
        (CLOSED_AT_ONCE, CLOSED_AT_ONCE),
        ("127.0.0.1:31733/bootstrap: Send failed: Broken pipe (after 0ms in state APIVERSION_QUERY)", CLOSED_AT_ONCE),
    ],
)
def test_a_cause_loses_the_wrapping_of_the_client_library(said: str, cause: str) -> None:
    assert plain_cause(said) == cause


def test_an_unreachable_kafka_is_told_with_the_command_that_starts_one_at_that_port() -> None:
    told = unreachable("127.0.0.1:9555", "Connection refused")
    assert told == (
        "Kafka does not answer at 127.0.0.1:9555 (connection refused): start it (for development: forebay broker "
        "--port 9555), or set kafka.bootstrap_servers"
    )
    assert "localhost:9092, started by forebay broker --port 9092" in unreachable("kafka.example:9092,b:1", None)
    assert "forebay broker" not in unreachable("127.0.0.1:9555", CLOSED_AT_ONCE)


@pytest.mark.parametrize(
    ("servers", "port"), [("a:1,b:2", 1), ("[::1]:7", 7), ("PLAINTEXT://a:3", 3), ("a", 9092), ("[::1]", 9092)]
)
def test_the_port_of_the_first_server_is_the_brokers(servers: str, port: int) -> None:
    assert broker_command(servers) == f"forebay broker --port {port}"


def test_a_missing_topic_is_told_with_both_commands_that_make_it() -> None:
    told = topic_missing("in", "a:1")
    assert "forebay topics" in told
    assert "kafka-topics.sh --bootstrap-server a:1 --create --topic in" in told


def test_the_admin_questions_say_the_same_sentence() -> None:
    with pytest.raises(KafkaUnavailableError) as told:
        admin.partition_counts({"bootstrap.servers": "127.0.0.1:1"}, timeout_seconds=0.5)
    assert str(told.value) == unreachable("127.0.0.1:1", "connection refused")


ALERT = (
    "ssl://127.0.0.1:9/bootstrap: Receive failed: error:0A000416:SSL routines::ssl/tls alert certificate unknown: SSL "
    "alert number 46 (after 1ms in state APIVERSION_QUERY)"
)


def test_a_certificate_that_brokers_do_not_take_is_told_like_a_login_and_with_its_mend() -> None:
    """It was told as a failure to read, and the mend was to start Kafka."""
    assert is_about_tls(ALERT)
    assert not is_about_tls("127.0.0.1:9/bootstrap: Receive failed: Connection reset by peer")
    told = login_refused(ALERT)
    assert "tls alert certificate unknown" in told
    assert "start it again with the new one" in told
    assert "127.0.0.1" not in told


def test_names_in_capitals_stay_in_capitals() -> None:
    assert plain_cause("a:9/bootstrap: SASL authentication error: no") == "SASL authentication error: no"
