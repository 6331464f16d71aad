"""Ten thousand schedules: the real corridor in a simulated world of deaths, rebalances and refusals.

A seed tells a schedule whole. `FOREBAY_SEED=7` runs seed 7 alone, `FOREBAY_SCHEDULES=100000` that many from seed 0. The
seeds of `make test` are always the same; `make faults-long` draws others and says where they begin.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.faults.checker import check
from tests.faults.history import Promise
from tests.faults.mutants import AT_LEAST_ONCE, EXACTLY_ONCE, IN_ORDER, IN_ORDER_OF_KEYS
from tests.faults.simulation import Run
from tests.seeds import drawn_seed

PROMISES = {
    "at_least_once": AT_LEAST_ONCE,
    "exactly_once": EXACTLY_ONCE,
    "order_partition": IN_ORDER,
    "order_key": IN_ORDER_OF_KEYS,
}
# Taken out of the environment: a worker refuses a FOREBAY_ variable that it does not know.
_SEED = os.environ.pop("FOREBAY_SEED", None)
_SCHEDULES = int(os.environ.pop("FOREBAY_SCHEDULES", "10000" if _SEED is None else str(len(PROMISES))))
FIRST = int(_SEED or 0)
EACH = -(-_SCHEDULES // len(PROMISES))
CHUNK = 250
DRAWN = 20_000
"""Schedules of a run whose first seed is drawn."""

KINDS = {
    "at_least_once": ("died before_commit", "died after_commit", "an acknowledgement was lost"),
    "exactly_once": (
        "died before_transaction_offsets",
        "died in_transaction",
        "died before_transaction_commit",
        "died after_transaction_commit",
    ),
}


def play(seed: int, name: str) -> Run:
    """Play one schedule; a failure says how to repeat it."""
    repeat = f"FOREBAY_SEED={seed} .venv/bin/pytest tests/faults/test_simulation.py -k '{name} and every_schedule'"
    run = Run(seed, PROMISES[name])
    try:
        found = check(run.play())
    except Exception as error:
        error.add_note(f"seed {seed}; to repeat it: {repeat}")
        raise
    if found:
        told = "\n".join(map(str, found))
        pytest.fail(f"seed {seed}, {name}:\n{told}\nto repeat it: {repeat}", pytrace=False)
    return run


@pytest.mark.parametrize("begin", range(FIRST, FIRST + EACH, CHUNK))
@pytest.mark.parametrize("name", PROMISES)
def test_every_schedule_keeps_every_promise(name: str, begin: int) -> None:
    for seed in range(begin, min(begin + CHUNK, FIRST + EACH)):
        play(seed, name)


@pytest.mark.long
@pytest.mark.parametrize("name", PROMISES)
def test_schedules_that_nobody_has_seen_keep_every_promise(name: str) -> None:
    first = drawn_seed()
    for seed in range(first, first + DRAWN // len(PROMISES)):
        play(seed, name)


@pytest.mark.parametrize("name", PROMISES)
def test_the_schedules_know_every_kind_of_trouble(name: str) -> None:
    """A schedule without trouble would prove nothing."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        seen += play(seed, name).seen
    expected = {
        "goes well", "dies before", "dies behind", "hangs", "runs out of memory", "runs out of slot", "is broken",
        "does not start again", "expelled", "killed", "revoked in haste", "drained in haste",
        "died after_receive", "died after_submit", "died before_produce", "died after_produce",
        "died during_revoke", "died during_drain",
    }  # fmt: skip
    expected.update(KINDS[PROMISES[name].guarantee])
    if PROMISES[name] != Promise():
        expected.discard("an acknowledgement was lost")
    assert expected <= seen.keys(), f"never seen: {expected - seen.keys()}"


def test_a_seed_tells_a_run_whole() -> None:
    """Otherwise no failure could be repeated."""
    for name in PROMISES:
        first, second = (Run(11, PROMISES[name]).play() for _ in range(2))
        assert first == second, name
