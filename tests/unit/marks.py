"""First numbers of a row that make `tests.inference.models` misbehave. No torch: many tests only send them."""

from __future__ import annotations

POISON, NOT_A_NUMBER, INFINITE, CRASH = -1.0, -2.0, -3.0, -4.0
