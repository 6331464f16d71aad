"""The checker's trust: every mutant of the worker is caught by it, in few of the schedules that the worker passes."""

from __future__ import annotations

import pytest

from forebay.errors import ConfigError, ForebayError
from tests.faults.checker import Finding, check
from tests.faults.mutants import MUTANTS, Mutant
from tests.faults.simulation import Run

TRIES = range(400)


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
            return check(Run(seed, mutant.promise).play())
        except ConfigError:
            raise  # no mutant's doing
        except ForebayError:
            return []  # it broke down by itself: that is seen, but not by the checker
