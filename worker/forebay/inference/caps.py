"""The caps of a replica: how many rows fit, by bucket, learnt from what did not. Pure arithmetic, no torch.

A bucket is the padded elements per row of the ragged inputs, 0 where nothing varies. What does not fit in a bucket does
not fit in a larger one; what ran in a bucket would have run in a smaller one. After `CLEAN` batches without a refusal
one batch probes an eighth more, for memory that somebody else took may be free again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CLEAN = 200
"""Batches without a refusal before a cap is probed."""


@dataclass(slots=True)
class _Cap:
    rows: int
    clean: int = 0

    @property
    def allowed(self) -> int:
        """Rows that the next batch may have: the cap, or a little more when it is time to probe."""
        return self.rows + max(self.rows // 8, 1) if self.clean >= CLEAN else self.rows


class Caps:
    """What was learnt about one kind of room. `largest` is the most rows that a batch may have anyway."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._caps: dict[int, _Cap] = {}

    def rows(self, bucket: int) -> int:
        """Return the most rows that may run together in a bucket."""
        if not self._caps:
            return self._largest
        return min([self._largest, *(cap.allowed for other, cap in self._caps.items() if other <= bucket)])

    def known(self, bucket: int) -> int:
        """Return the same where it was learnt; 0 where no bound is known."""
        return self.rows(bucket) if any(other <= bucket for other in self._caps) else 0

    def refused(self, bucket: int, rows: int, fits: int | None = None) -> None:
        """Learn that `rows` rows did not fit; `fits` is how many would have, where that is known, else half of them."""
        if rows > self.rows_proven(bucket):  # a probe, so the cap stands
            for other, cap in self._caps.items():
                if other <= bucket:
                    cap.clean = 0
            return
        self._caps[bucket] = _Cap(max(fits if fits is not None else rows // 2, 1))

    def rows_proven(self, bucket: int) -> int:
        """Return the most rows of a bucket that are known to fit, or that nothing is known against."""
        return min([self._largest, *(cap.rows for other, cap in self._caps.items() if other <= bucket)])

    def ran(self, bucket: int, rows: int) -> None:
        """Learn that a batch ran without a refusal, `rows` of it together at most."""
        for other, cap in list(self._caps.items()):
            if other > bucket:
                continue
            if cap.clean >= CLEAN and rows > cap.rows:
                cap.rows, cap.clean = rows, 0
                if rows >= self._largest:
                    del self._caps[other]
            else:
                cap.clean += 1

    def saved(self) -> dict[int, _Cap]:
        """Return what is known now, to go back to."""
        return {bucket: replace(cap) for bucket, cap in self._caps.items()} if self._caps else {}

    def restore(self, saved: dict[int, _Cap]) -> None:
        """Go back: what was learnt since was the fault of one request alone."""
        self._caps = {bucket: replace(cap) for bucket, cap in saved.items()}
