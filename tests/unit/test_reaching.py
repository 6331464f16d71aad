"""A cluster that does not answer: what is certain ends a command at once, what may pass is waited for and told."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from typer.testing import CliRunner

from forebay.calls import Calls, ClientOptions
from forebay.cli import progress
from forebay.cli.app import app
from forebay.errors import KafkaUnavailableError
from forebay.stream import reaching
from forebay.stream.addresses import Address
from forebay.stream.reaching import RefusedError, metadata, nobody_listens

NOWHERE = "127.0.0.1:1"


class Silent:
    """A client that gets no answer, or one after some tries; `complains` is what its error_cb hears when polled."""

    def __init__(self, *complains: int, answers_after: int | None = None, reads: bool = False) -> None:
        self.errors: list[KafkaError] = []
        self.tries: list[float] = []
        self.polls = 0
        self._complains = complains
        self._answers_after = answers_after
        if reads:
            self.assignment = lambda: ["a partition"]

    def list_topics(self, timeout: float) -> str:
        self.tries.append(timeout)
        if self._answers_after is not None and len(self.tries) > self._answers_after:
            return "the cluster"
        raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def poll(self, _: float) -> None:
        self.polls += 1
        self.errors += [KafkaError(code) for code in self._complains]


@pytest.fixture
def silent_address() -> Iterator[str]:
    """Something that takes the connection and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def far() -> float:
    return time.monotonic() + 3600


def test_where_nothing_listens_a_question_is_asked_once() -> None:
    """Every command was silent for 10 to 18 seconds before it said that nothing listens there."""
    client = Silent()
    with pytest.raises(KafkaUnavailableError, match=r"127\.0\.0\.1:1 \(connection refused\)"):
        metadata(client, NOWHERE, client.errors, far())
    assert len(client.tries) == 1


def test_who_waits_is_told_the_cause_once_and_gets_the_answer_that_comes_later() -> None:
    client, told = Silent(answers_after=3), []
    assert metadata(client, NOWHERE, client.errors, far(), on_wait=told.append) == "the cluster"
    assert told == ["connection refused"]


def test_who_waits_in_vain_gets_the_error_at_the_deadline() -> None:
    client, told = Silent(), []
    with pytest.raises(KafkaUnavailableError, match="connection refused"):
        metadata(client, NOWHERE, client.errors, time.monotonic(), on_wait=told.append)
    assert told == []


def test_an_address_where_something_listens_is_asked_again(silent_address: str) -> None:
    client = Silent(answers_after=2)
    assert metadata(client, f"{NOWHERE},{silent_address}", client.errors, far()) == "the cluster"
    assert len(client.tries) == 3


def test_a_refused_login_ends_even_who_waits() -> None:
    client = Silent(KafkaError._AUTHENTICATION)
    with pytest.raises(RefusedError):
        metadata(client, NOWHERE, client.errors, far(), on_wait=lambda _: None)
    assert len(client.tries) == 1


def test_a_reader_is_not_polled_which_would_cost_it_a_record() -> None:
    reader = Silent(reads=True)
    with pytest.raises(KafkaUnavailableError):
        metadata(reader, NOWHERE, reader.errors, far())
    assert reader.polls == 0


def test_only_what_is_certain_of_every_address_is_called_dead(silent_address: str) -> None:
    assert nobody_listens(NOWHERE) == "connection refused"
    assert (
        nobody_listens(f"{NOWHERE},no.invalid:9")
        == f"{NOWHERE}: connection refused, no.invalid:9: the name does not resolve"
    )
    assert nobody_listens(f"{NOWHERE},{silent_address}") is None
    assert nobody_listens("") is None


def test_a_probe_that_is_held_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may be silent for as long as it likes."""

    answered = threading.Event()

    def late(servers: str, _: float) -> list[Address]:
        answered.wait()
        return [Address(servers, 1, "connection refused")]

    monkeypatch.setattr(reaching, "connect_to", late)
    try:
        assert nobody_listens(NOWHERE, within=0.01) is None
    finally:
        answered.set()


@pytest.mark.parametrize("first", ["opens", "waits"])
def test_a_call_connects_for_no_longer_than_it_may_take(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`infer(timeout=1)` took 10 seconds without a broker."""
    given: list[float] = []

    def fail(_: Any, timeout: float) -> None:
        given.append(timeout)
        raise KafkaUnavailableError("no")

    monkeypatch.setattr("forebay.calls.Exchange.open", fail)
    calls = Calls(NOWHERE, ClientOptions(connect_timeout=10))
    if first == "waits":
        calls._lock.acquire()
    with pytest.raises(KafkaUnavailableError, match="no"):
        calls.send({"x": [1.0]}, 0.25, {})
    assert given == ([0.25] if first == "opens" else [])


@pytest.mark.parametrize(("seconds", "connect"), [(None, 10), (60.0, 10), (2.0, 2)])
def test_a_long_call_connects_for_as_long_as_the_client_says(
    seconds: float | None, connect: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    monkeypatch.setattr("forebay.calls.Exchange.open", lambda _, timeout: given.append(timeout))
    Calls(NOWHERE, ClientOptions(connect_timeout=10)).open(seconds)
    assert given == [connect]


def test_a_wait_for_kafka_is_told_on_standard_error_with_its_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LATE_SECONDS", 0.0)
    with progress.waiting_for_kafka("a:1", 10) as telling:
        telling.join()
    told = capsys.readouterr()
    assert told.err == "waiting for Kafka at a:1, 10 s at most\n"
    assert told.out == ""


def test_an_answer_in_time_leaves_no_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LATE_SECONDS", 3600.0)
    with progress.waiting_for_kafka("a:1", 10) as telling:
        assert telling.is_alive()
    telling.join()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "command",
    [
        ["topics"],
        ["results"],
        ["dlq", "list"],
        ["dlq", "replay"],
        ["request", "--inputs", '{"x": [1.0]}'],
        ["bench", "--inputs", '{"x": [1.0]}'],
    ],
    ids=" ".join,
)
def test_a_command_for_one_answer_ends_at_the_first_refusal(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []
    probe = nobody_listens
    monkeypatch.setattr(reaching, "nobody_listens", lambda servers: tries.append(servers) or probe(servers))
    result = CliRunner().invoke(app, [*command, "-b", NOWHERE], standalone_mode=False)
    assert isinstance(result.exception, KafkaUnavailableError), result.output
    assert result.exception.exit_code == 69
    assert "forebay broker --port 1" in str(result.exception)
    assert tries == [NOWHERE]
