"""What a worker still does that leaves without a drain, because its replicas are lost: it settles, and hands on.

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
    deadline = clock() + _SECONDS
    with contextlib.suppress(ForebayError):
        while (now := clock()) < deadline:
            poll()
            settle(now)
            if committer.is_settled and not outbox.unacknowledged:
                return
            time.sleep(0.001)
