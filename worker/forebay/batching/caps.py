"""How many rows a batch may have now: what the target latency allows, and what the device's memory was seen to hold."""

from __future__ import annotations

from forebay.batching.curve import Curve
from forebay.batching.policy import Policy

_KNEE = 0.9
"""Share of the throughput at the largest batch beyond which larger batches only add latency."""


class Caps:
    """The caps of one model, by bucket."""

    def __init__(self, policy: Policy, curve: Curve) -> None:
        self._policy = policy
        self._curve = curve
        self._latency: dict[int, int] = {}
        self._memory: dict[int, int] = {}
        self._version = -1

    def rows(self, bucket: int) -> int:
        """Return the most rows of a batch in a bucket, at least one.

        A request can just miss a batch and then run in the next: two service times have to fit into the target.
        """
        most = self._policy.bounds.rows
        if self._policy.target_latency is not None:
            if self._version != self._curve.version:
                self._latency.clear()
                self._version = self._curve.version
            cap = self._latency.get(bucket)
            if cap is None:
                cap = self._latency[bucket] = self._for_latency(bucket, most, self._policy.target_latency)
            most = min(most, cap)
        if self._memory:
            most = min([most, *(cap for other, cap in self._memory.items() if other <= bucket)])
        return max(most, 1)

    def remember(self, bucket: int, rows: int | None) -> None:
        """Take over what the replica says that its memory holds; None: no bound is known."""
        if rows is None:
            self._memory.pop(bucket, None)
        else:
            self._memory[bucket] = rows

    def forget(self) -> None:
        """Forget what the device's memory held: another model runs under this name."""
        self._memory.clear()

    def memory(self) -> dict[int, int]:
        """Return the caps of the device's memory, by bucket."""
        return dict(self._memory)

    def _for_latency(self, bucket: int, most: int, target: float) -> int:
        curve = self._curve
        cap = curve.largest(bucket, (target - self._policy.overhead) / 2, most)
        if cap <= 1 or not curve.predict(bucket, cap):
            return max(cap, 1)
        wanted = _KNEE * most / max(curve.predict(bucket, most), 1e-9)
        rows = 1
        while rows < cap and rows / max(curve.predict(bucket, rows), 1e-9) < wanted:
            rows += max(rows // 16, 1)
        return min(rows, cap)
