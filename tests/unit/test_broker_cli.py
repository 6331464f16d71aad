"""The command line of `forebay broker`, as far as it starts nothing."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from forebay.brokers.embedded import EmbeddedKafka
from forebay.cli.app import app
from forebay.errors import KafkaUnavailableError, UsageError


@pytest.mark.parametrize("text", ["", ":3", "a:", "a:0", "a:-1", "a:b", "a:1.5", "a:²", "a:99999"])
def test_a_topic_that_cannot_be_read_is_one_sentence_with_an_example(text: str) -> None:
    result = CliRunner().invoke(app, ["broker", "--topic", text])

    assert isinstance(result.exception, UsageError)
    assert str(result.exception).startswith("--topic takes NAME or NAME:PARTITIONS, for example requests:3")


@pytest.mark.parametrize("text", ["", "3", "3.7", "3.6.2", "latest", "4.0.x", "-4.0.0", "4.0.0.1"])
def test_a_version_that_cannot_be_run_is_one_sentence_with_an_example(text: str) -> None:
    result = CliRunner().invoke(app, ["broker", "--kafka-version", text])

    assert isinstance(result.exception, UsageError)
    assert str(result.exception).startswith("--kafka-version takes 3.7.0 or later, for example 4.3.1, not ")


def test_a_broker_that_is_not_started_has_no_address() -> None:
    with pytest.raises(KafkaUnavailableError, match="not started"):
        _ = EmbeddedKafka().bootstrap_servers


def test_a_broker_that_is_not_started_can_be_stopped() -> None:
    cluster = EmbeddedKafka()

    cluster.stop()

    assert cluster.java_pids() == []
