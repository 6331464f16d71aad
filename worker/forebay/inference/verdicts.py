"""Candidates and the verdict on them: which precision and which compilation to adopt. Pure, no torch.

The replica judges with it for `inference.precision: auto`, and `forebay optimize` in its own process; its questions to
the processes that measure, and their answers, are here, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from forebay.inference.messages import Start, Tried

CANDIDATES = ("fp32", "tf32", "bf16", "fp16", "int8", "int8_weight_only", "float8", "int4")
"""Every precision, the most exact one first."""

COMPILERS = ("none", "inductor", "aoti", "cudagraph")
"""Every compilation, the plainest one first."""

DEFAULT_MOST = 0.02
"""What is tolerated where the settings say nothing: a fiftieth of the largest output, or of the labels."""

_AS_FAST = 1.05
"""What is no more than this much slower is as fast: the more exact one is taken then."""


class Question(msgspec.Struct):
    """What to measure: `start` has the precision and the compilation; `output` is where pruned weights are to go."""

    start: Start
    sparsity: str = ""
    share: float = 0.5
    most: float = DEFAULT_MOST
    output: str = ""


class Answer(msgspec.Struct):
    """What was measured. `error` says why the model cannot be tried at all; `zeros` counts pruned weights."""

    tried: Tried
    device: str = ""
    notes: list[str] = []
    zeros: int = 0
    error: str = ""
    written: str = ""


def judge(tried: Sequence[Tried], most: float) -> Tried | None:
    """Give every trial its verdict, and return the adopted one: the fastest within `most`, of equals the most exact."""
    ran = [one for one in tried if not one.verdict]
    good = [one for one in ran if one.deviation <= most]
    best = min((one.full_seconds for one in good), default=0.0)
    chosen = min(
        (one for one in good if one.full_seconds <= best * _AS_FAST),
        key=lambda one: (CANDIDATES.index(one.precision), COMPILERS.index(one.compile)),
        default=None,
    )
    for one in ran:
        if one is chosen:
            one.verdict = "adopted"
        elif one.deviation > most:
            one.verdict = f"deviates more than {most:g}"
        else:
            one.verdict = "not faster"
    return chosen
