"""Failpoints: what they read, when they act, and that they are nothing while they are off."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import failpoints
from forebay.errors import ConfigError
from forebay.failpoints import PLACES, FailpointError, arm, arm_from_environment, hit, parse

WORKER = Path(failpoints.__file__).parent
PASSING = re.compile(r'failpoints\.hit\("(\w+)"\)')


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    arm([])


def run(text: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that passes places in a process of its own."""
    script = f"from forebay.failpoints import arm_from_environment, hit\narm_from_environment()\n{script}"
    environment = {**os.environ, "FOREBAY_FAILPOINTS": text}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def fired(entry: str, times: int) -> list[int]:
    """At which of so many passings an error is raised."""
    arm(parse(entry))
    found = []
    for number in range(1, times + 1):
        try:
            hit("before_commit")
        except FailpointError:
            found.append(number)
    return found


def test_nothing_happens_anywhere_while_none_is_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREBAY_FAILPOINTS", raising=False)
    assert arm_from_environment() == []
    assert failpoints._armed is None
    for place in PLACES:
        hit(place)


def test_a_failpoint_acts_every_time_or_at_the_nth_time_only() -> None:
    assert fired("before_commit=error", 3) == [1, 2, 3]
    assert fired("before_commit=error@2", 4) == [2]


def test_a_chance_is_the_same_for_the_same_seed() -> None:
    first = fired("before_commit=error%0.3/42", 200)
    assert first == fired("before_commit=error%0.3/42", 200)
    assert first != fired("before_commit=error%0.3/43", 200)
    assert 20 < len(first) < 100
    assert fired("before_commit=error%0", 50) == []
    assert fired("before_commit=error%1", 2) == [1, 2]


def test_other_places_are_not_concerned() -> None:
    arm(parse("before_commit=error"))
    for place in PLACES:
        if place != "before_commit":
            hit(place)


def test_an_error_says_what_it_was_told_to_say() -> None:
    arm(parse("after_commit=error:out of luck; before_commit=error"))
    with pytest.raises(FailpointError, match="out of luck"):
        hit("after_commit")
    with pytest.raises(FailpointError, match="the failpoint before_commit was told to fail"):
        hit("before_commit")


def test_a_sleep_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    arm(parse("after_receive=sleep:250ms;after_submit=sleep:1.5s@1"))
    hit("after_receive")
    hit("after_submit")
    hit("after_submit")
    assert slept == [0.25, 1.5]


def test_a_kill_is_a_kill() -> None:
    ended = run("before_commit=kill@2", "hit('before_commit'); print('once', flush=True); hit('before_commit')")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "once\n")


def test_a_stop_with_a_time_ends_by_itself() -> None:
    ended = run("before_commit=stop:100ms", "hit('before_commit'); print('awake')")
    assert (ended.returncode, ended.stdout) == (0, "awake\n")


def test_a_stop_without_a_time_waits_to_be_woken() -> None:
    script = "from forebay.failpoints import *; arm_from_environment(); hit('before_commit'); print('awake')"
    environment = {**os.environ, "FOREBAY_FAILPOINTS": "before_commit=stop"}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0] == b"awake\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "before_comit=kill",
            r"unknown place 'before_comit' \(did you mean before_commit\?\); known are after_receive,",
        ),
        ("before_commit=die", r"unknown action 'die'; known are kill, stop, sleep, error"),
        ("before_commit", r"must read place=action\[:argument\]\[@n or %probability/seed\]"),
        ("before_commit=kill@0", r"counts from @1"),
        ("before_commit=kill:now", r"kill takes no argument"),
        ("before_commit=sleep", r"needs a time such as 500ms or 2s"),
        ("before_commit=stop:soon", r"needs a time such as 500ms or 2s"),
        ("before_commit=error%7", r"a probability from 0 to 1"),
        ("before_commit=error%often", r"a probability from 0 to 1"),
        ("before_commit=kill;before_commit=error", r"before_commit is there twice"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        parse(text)
    assert str(error.value).startswith("FOREBAY_FAILPOINTS: ")


def test_empty_entries_are_nothing() -> None:
    assert parse("") == parse(" ; ") == []
    assert [entry.place for entry in parse("before_commit=kill; ;after_commit=kill;")] == [
        "before_commit",
        "after_commit",
    ]


def test_every_place_is_passed_somewhere_and_every_passing_has_a_name_that_is_known() -> None:
    """A place that nobody passes would be a test that tests nothing."""
    passed = {name for path in WORKER.rglob("*.py") for name in PASSING.findall(path.read_text())}
    assert passed == set(PLACES)
