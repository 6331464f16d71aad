"""Fairness between flows: the partitions, or the tenants, whose requests wait in the same lanes. Pure.

Start-time fair queueing in row-seconds: each flow has an account of the service that it took, and the flow with the
smallest account goes first. A flow that was silent does not save up: it starts at most one batch behind the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from forebay.records import Request

_MOST = 4096

Flow = Hashable


def flow_of(request: Request) -> Flow:
    """Return what a request is counted to: its tenant where it names one, else its partition."""
    if request.tenant is not None:
        return request.tenant
    record = request.record
    return record.topic, record.partition


class Accounts:
    """The service that flows took, in seconds of the model."""

    def __init__(self) -> None:
        self._served: dict[Flow, float] = {}
        self._now = 0.0

    def next(self, flows: Iterable[Flow], slack: float) -> Flow:
        """Return the flow whose turn it is. `slack` is the lead that a silent flow may have, in seconds."""
        floor = self._now - slack
        served = self._served
        chosen = None
        least = float("inf")
        for flow in flows:
            start = served.get(flow, floor)
            if start < floor:
                start = floor
            if start < least:
                least, chosen = start, flow
        served[chosen] = least
        self._now = max(self._now, least)
        return chosen

    def charge(self, flow: Flow, seconds: float) -> None:
        """Count service to a flow."""
        served = self._served
        if len(served) >= _MOST:  # tenants come and go
            self._served = served = {one: start for one, start in served.items() if start > self._now}
        served[flow] = served.get(flow, self._now) + seconds
