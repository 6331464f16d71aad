"""Random histories: those that are clean pass the checker, and damage of each kind is found in the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults.checker import check, verify
from tests.faults.history import (
    Promise,
)
from tests.unit.test_checker import DAMAGES, PROMISES, Damage, Dice, Writer


@given(promise=PROMISES, seed=st.integers(0, 2**32))
def test_random_clean_histories_pass(promise: Promise, seed: int) -> None:
    verify(Writer(Dice(seed), promise).write())


@pytest.mark.parametrize(("code", "damage"), DAMAGES, ids=lambda value: getattr(value, "__name__", value))
@given(promise=PROMISES, seed=st.integers(0, 2**32))
def test_random_damage_of_each_kind_is_found(code: str, damage: Damage, promise: Promise, seed: int) -> None:
    history = Writer(Dice(seed), promise).write()
    try:
        damaged = damage(history, Dice(seed + 1))
    except (IndexError, ValueError):
        return  # there was nothing of this kind to damage: no letter, no two outcomes in one line
    assert code in {finding.code for finding in check(damaged)}
