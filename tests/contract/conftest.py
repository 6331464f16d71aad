"""The fixtures of the contract tests: the side of Kafka that a test runs on."""

from __future__ import annotations

from tests.contract.sides import side

__all__ = ["side"]
