"""What the log says of a worker that is not ready: new reasons at once, lasting ones seldom, and that it is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from forebay import hindrances
from forebay.health import Health
from forebay.hindrances import Hindrances
from forebay.logs import logger
from forebay.testing import ManualClock


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EventDict]]:
    monkeypatch.setattr(hindrances, "_log", logger("worker"))
    with capture_logs() as lines:
        yield lines


class Scene:
    """A worker's health, looked at twice a second."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.health = Health(self.clock)
        self.health.phase = "serving"
        self.hindrances = Hindrances(self.health)

    def live(self, seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            self.health.beat(self.clock.now)
            self.hindrances.look(self.clock.now)
            self.clock.advance(0.5)


def test_a_reason_is_told_when_it_comes_and_when_it_is_over(lines: list[EventDict]) -> None:
    scene = Scene()
    scene.live(5)
    assert lines == []
    scene.health.trouble("delivery", "results: no right")
    scene.live(30)
    scene.health.trouble("delivery", None)
    scene.live(5)
    [begin, end] = lines
    assert (begin["event"], begin["log_level"], begin["delivery"]) == ("not_ready", "warning", "results: no right")
    assert (end["event"], end["after_seconds"]) == ("ready_again", 30)


def test_a_reason_that_lasts_is_told_once_a_minute_and_another_one_sooner(lines: list[EventDict]) -> None:
    scene = Scene()
    scene.health.trouble("delivery", "results: no right")
    scene.live(121)
    assert [line["event"] for line in lines] == ["not_ready"] * 3
    scene.health.trouble("delivery", "results: no topic")
    scene.live(5)
    scene.health.trouble("kafka", "no login")
    scene.live(10)
    assert [line.get("delivery", line.get("kafka")) for line in lines[3:]] == ["no login", "results: no topic"]


def test_a_reason_that_comes_and_goes_fills_no_disk(lines: list[EventDict]) -> None:
    scene = Scene()
    for number in range(100):
        scene.health.trouble("kafka", "gone" if number % 2 else None)
        scene.live(0.5)
    assert [line["event"] for line in lines] == ["not_ready", "ready_again"]


def test_a_worker_that_drains_while_nothing_can_be_delivered_says_so(lines: list[EventDict]) -> None:
    scene = Scene()
    scene.health.phase = "draining"
    scene.live(5)
    assert lines == []
    scene.health.trouble("delivery", "results: no right")
    scene.live(5)
    [line] = lines
    assert line["delivery"] == "results: no right"
    assert "phase" not in line
