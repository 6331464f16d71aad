"""Why batches were cut, in words for a person; `forebay demo` and `forebay top` say the same. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.records import Reason

WHY: Mapping[str, str] = {
    Reason.ALLOWED_SIZE: "an allowed size",
    Reason.IDLE: "replica idle",
    Reason.FULL_ROWS: "full",
    Reason.FULL_COST: "full by cost",
    Reason.FULL_BYTES: "full by bytes",
    Reason.LINGER_EXPIRED: "waited long enough",
    Reason.DEADLINE: "a deadline was near",
    Reason.DRAIN: "draining",
    Reason.SPLIT: "part of a larger one",
    Reason.ISOLATION: "finding a guilty row",
    Reason.STEP: "a place was free",
}


def in_words(reason: str) -> str:
    """Give the words for a reason as metrics name it; an unknown one, of a newer worker, stays as it is."""
    return WHY.get(reason, reason)
