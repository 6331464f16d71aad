"""The checker's trust: seeded runs of the real worker pass it, and every mutant of the worker is caught by it."""

from __future__ import annotations

import pytest

from forebay.errors import ForebayError
from tests.faults.checker import Finding, check, verify
from tests.faults.history import Promise
from tests.faults.memory_group import Run
from tests.faults.mutants import AT_LEAST_ONCE, EXACTLY_ONCE, IN_ORDER, IN_ORDER_OF_KEYS, MUTANTS, Mutant

SEEDS = range(10)
TRIES = range(60)
PROMISES = {
    "at least once": AT_LEAST_ONCE,
    "exactly once": EXACTLY_ONCE,
    "in the order of the partition": IN_ORDER,
    "in the order of the key": IN_ORDER_OF_KEYS,
}


@pytest.mark.parametrize("promise", PROMISES.values(), ids=PROMISES.keys())
def test_the_worker_as_it_is_keeps_every_invariant_in_seeded_runs(
    promise: Promise, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = requests = 0
    for seed in SEEDS:
        with monkeypatch.context() as patch:
            history = Run(seed, patch, promise).play()
        assert history.inputs
        faults += len(history.faults)
        requests += len(history.inputs)
        try:
            verify(history)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None
    assert faults > len(SEEDS), "the runs are too quiet to say anything"


@pytest.mark.long
@pytest.mark.parametrize("promise", PROMISES.values(), ids=PROMISES.keys())
def test_a_thousand_seeds_find_nothing(promise: Promise, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1000, 2000):
        with monkeypatch.context() as patch:
            history = Run(seed, patch, promise).play()
        assert check(history) == [], f"seed {seed}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_worker_with_one_thing_broken_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, list[str]] = {}
    for seed in TRIES:
        found = _findings(mutant, seed, monkeypatch)
        if mutant.found_by in {finding.code for finding in found}:
            return
        seen[seed] = [str(finding) for finding in found]
    pytest.fail(f"{mutant.found_by} has not found it in {len(TRIES)} runs: {seen}")


def _findings(mutant: Mutant, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    with monkeypatch.context() as patch:
        mutant.breaks(patch)
        try:
            return check(Run(seed, patch, mutant.promise).play())
        except ForebayError:
            return []  # it broke down by itself: that is seen, but not by the checker
