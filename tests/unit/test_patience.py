"""Calls that do not return are left behind, and the next one goes on without them."""

from __future__ import annotations

import threading

import pytest

from forebay.stream.patience import Patience


def fail() -> None:
    raise ValueError("no")


def test_it_returns_what_the_call_returns_and_raises_what_it_raises() -> None:
    patience = Patience()
    assert patience.call(lambda: 7, 60) == 7
    with pytest.raises(ValueError, match="no"):
        patience.call(fail, 60)
    assert patience.call(threading.get_ident, 60) == patience.call(threading.get_ident, 60) != threading.get_ident()


def test_a_call_that_does_not_return_is_given_up_and_its_late_answer_is_nobodys() -> None:
    patience, gate, ended = Patience(), threading.Event(), threading.Event()

    def late() -> str:
        gate.wait(60)
        ended.set()
        return "late"

    with pytest.raises(TimeoutError, match="has not returned"):
        patience.call(late, 0.01)
    assert patience.call(lambda: "prompt", 60) == "prompt"
    gate.set()
    assert ended.wait(60)
    assert patience.call(lambda: "next", 60) == "next"
