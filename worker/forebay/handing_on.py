"""What a worker does last: it settles what is answered; one that leaves without a drain, its replicas lost, hands on.

On the corridor's thread, after the loop has ended. Nothing is begun here any more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from forebay.errors import ForebayError
from forebay.stream.committer import Committing
from forebay.stream.outbox import Outgoing

_SECONDS = 5.0


def hand_on(
    committer: Committing,
    outbox: Outgoing,
    clock: Callable[[], float],
    poll: Callable[[], None],
    settle: Callable[[float], None],
) -> None:
    """Commit what is answered, and let the commits say who is under suspicion: the next owner goes on from there.

    `poll` serves the consumer's callbacks. What goes wrong here does not matter: the reason to leave is known.
    """
    with contextlib.suppress(ForebayError):
        settle_until(
            clock() + _SECONDS, lambda: committer.is_settled and not outbox.unacknowledged, clock, poll, settle
        )


def settle_until(
    deadline: float,
    is_settled: Callable[[], bool],
    clock: Callable[[], float],
    poll: Callable[[], None],
    settle: Callable[[float], None],
) -> None:
    """Settle, once at least unless time is up, until nothing is left to commit."""
    while (now := clock()) < deadline:
        poll()
        settle(now)
        if is_settled():
            return
        time.sleep(0.001)
