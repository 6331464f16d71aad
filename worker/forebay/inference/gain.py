"""Whether several replicas of a model give more than one: measured once, before the worker joins its group.

On a device that one replica keeps busy a second one takes memory and gives nothing. Runs on the loop's thread while it
has nothing else to do, for a second at most; whatever goes wrong here is no reason not to start. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.inference.limits import Notice
from forebay.inference.messages import Measure, Measured, encode
from forebay.inference.pool import Pool
from forebay.inference.replicas import Replica

ENOUGH = 1.05
"""What all replicas together must do, relative to one, to be worth their memory."""

COMPARED = "replicas_compared"
_ALONE_SECONDS = 0.2
_TOGETHER_SECONDS = 0.3
_GRACE_SECONDS = 2.0
_LONGEST_BATCH = 0.25
"""Seconds of a batch above which nothing is measured: the start would wait too long for it."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Rows per second of one replica alone and of all together."""

    replicas: int
    alone: float
    together: float

    @property
    def ratio(self) -> float:
        """What all do, relative to one."""
        return self.together / self.alone

    @property
    def mend(self) -> str:
        """Say what to set; empty where the replicas are worth it."""
        if self.ratio >= ENOUGH:
            return ""
        return (
            f"{self.replicas} replicas do {self.ratio:.2f} times what one does: one keeps the device busy, so set "
            "inference.replicas to 1, or inference.threads lower where the replicas share cores"
        )


def compare(pool: Pool) -> None:
    """Leave a notice for each model with several replicas: what they do together, and what to set if that is little."""
    for model in pool.signatures:
        replicas = list(pool.of(model))
        if any(replica.transport.descriptor() is None for replica in replicas):
            continue  # inline ones run one after the other anyway
        gain = gain_of(replicas, pool.curves.get(model, ()))
        if gain is not None:
            fields: dict[str, object] = {
                "replicas": gain.replicas,
                "alone_rows_per_second": round(gain.alone, 1),
                "together_rows_per_second": round(gain.together, 1),
                "gain": round(gain.ratio, 3),
            }
            pool.notices.append(Notice(COMPARED, model, {**fields, "mend": gain.mend} if gain.mend else fields))


def gain_of(replicas: Sequence[Replica], curve: Sequence[tuple[int, int, float]]) -> Gain | None:
    """Measure the replicas of one model; None where there is nothing to compare, or no answer in time.

    `curve` has (bucket, rows, seconds) of the warm-up. One is measured before and after all of them, and its better
    result counts: a machine that is busy with something else for a moment must not make more replicas look good.
    """
    longest = max((seconds for _, _, seconds in curve), default=0.0)
    if len(replicas) < 2 or longest > _LONGEST_BATCH:
        return None
    rates: list[float] = []
    plan = ((replicas[:1], _ALONE_SECONDS), (replicas, _TOGETHER_SECONDS), (replicas[:1], _ALONE_SECONDS))
    for several, seconds in plan:
        rate = _rate(several, seconds)
        if rate is None:
            return None
        rates.append(rate)
    before, together, after = rates
    return Gain(len(replicas), max(before, after), together)


def _rate(replicas: Sequence[Replica], seconds: float) -> float | None:
    """Return the rows per second of replicas that run at the same time; None where one of them does not answer."""
    answers: dict[str, Measured] = {}
    deadline = time.monotonic() + seconds + _GRACE_SECONDS
    try:
        for replica in replicas:
            replica.transport.send(encode(Measure(seconds)))
        while len(answers) < len(replicas):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.002)
            for replica in replicas:
                for said in replica.messages(time.monotonic()):
                    if isinstance(said, Measured):
                        answers[replica.name] = said
    except (EOFError, OSError):
        return None  # it is gone: who listens to it next sees that, and replaces it
    rates = [said.rows / said.seconds for said in answers.values() if said.rows and said.seconds > 0]
    return sum(rates) if rates and len(rates) == len(replicas) else None
