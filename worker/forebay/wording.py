"""Words for people: a count with its noun in the right number. Pure; any thread."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Give `1 broker`, `2 brokers`, `1,000 replicas`; `plural` where an s does not do."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def times(count: int) -> str:
    """Give `once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")
