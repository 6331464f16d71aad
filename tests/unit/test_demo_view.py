"""The demo's lines: what each shows at which width."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from examples.sample import Answer, Sample
from forebay.cli.demo_examples import Example
from forebay.cli.demo_report import Arrival
from forebay.cli.demo_view import ConsoleView

EXAMPLE = cast(Example, SimpleNamespace(columns=("photo", "what it sees")))


def shown(width: int) -> list[str]:
    """The lines of two acts of one request each."""
    out = io.StringIO()
    view = ConsoleView(EXAMPLE, Console(file=out, width=width, force_terminal=True, color_system=None, soft_wrap=True))
    sample = Sample("motorcycle_left.png, vivid", "a motorcycle", {"image": [b"x"]}, ("moped",), True)
    for act, size in (("alone", 1), ("together", 16)):
        view.act(cast(Any, act), 1)
        view.arrival(Arrival(sample, act == "alone", 0.0, 0.0123, size, Answer("moped", 0.83)))
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


@pytest.mark.parametrize(("width", "is_wide"), [(80, False), (105, False), (106, True), (112, True), (200, True)])
def test_every_line_fits_and_shows_name_answer_score_batch_and_latency(width: int, is_wide: bool) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= min(width, 112)
    result = lines[-1]
    for text in ("motorcycle_left.png, vivid", "moped", "83%", "batch 16", "12.3 ms"):
        assert text in result
    assert ("a motorcycle" in result) is is_wide


@pytest.mark.parametrize("width", [80, 112])
def test_the_columns_are_headed_once_and_lie_below_their_heads(width: int) -> None:
    lines = shown(width)
    (head,) = [line for line in lines if "what it sees" in line]
    assert head.index("what it sees") == lines[-1].index("moped")
    assert len(head) == len(lines[-1])
