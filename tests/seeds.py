"""The seed of tests that draw: another one each time, told where it fails, and given by FAULT_SEED to repeat a run."""

from __future__ import annotations

import os
import random

VARIABLE = "FAULT_SEED"
"""Without the prefix of a setting: a worker refuses a FOREBAY_ variable that it does not know."""


def drawn_seed() -> int:
    """Return the seed of this run; pytest shows the line that is printed where the test fails."""
    seed = int(os.environ.get(VARIABLE) or random.SystemRandom().randrange(10**6, 10**9))
    print(f"{VARIABLE}={seed} repeats this run")
    return seed
