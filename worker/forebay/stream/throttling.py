"""Quotas of the brokers: the client waits for as long as they ask it to, and says so only here.

Callbacks of the client append, on the loop's thread or on that where a transaction ends; the observer takes on the
loop's thread. Nothing is decided by it: what a quota holds up is late and not lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Wait:
    """A broker has asked a client, the consumer or the producer, to wait."""

    client: str
    broker: str
    seconds: float


@dataclass(slots=True)
class Throttling:
    """What quotas have held up since it was last taken."""

    waits: deque[Wait] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def watch(self, client: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the properties of a client with the callback that tells when it is asked to wait."""
        return {**config, "throttle_cb": partial(self._note, client)}

    def _note(self, client: str, event: Any) -> None:
        if event.throttle_time > 0:
            self.waits.append(Wait(client, f"{event.broker_name} ({event.broker_id})", event.throttle_time))
