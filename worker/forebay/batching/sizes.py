"""How large a batch is and may be: bounds, and the padded size of a candidate batch while it grows. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from forebay.batching.padding import Axes, bound, padded_rows, volume
from forebay.records import Reason, Request


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large a batch may be. `rows` counts rows; `bytes` and `cost` count what padding adds, too.

    `bytes` bounds a staged batch, padded to its longest request. `cost` bounds what the model runs: rows padded to the
    next of `allowed`, the `ragged` dimensions to the next of `lengths`, where there are any.
    """

    rows: int
    bytes: int
    cost: float | None = None
    cost_unit: Literal["rows", "elements", "bytes"] = "rows"
    allowed: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    ragged: Axes = ()


class Size:
    """The padded size of a batch while it grows: rows, bytes, elements, and the cost that `prepare` said."""

    __slots__ = ("_dims", "_element_bytes", "_padded", "_text_bytes", "rows", "said")

    def __init__(self, first: Request) -> None:
        self.rows = first.rows
        self.said = first.cost
        self._text_bytes = _text_bytes(first)
        self._dims = [list(shape[1:]) for shape in first.shapes]
        self._padded = [volume(dims) for dims in self._dims]
        self._element_bytes = [
            len(tensor) / max(first.rows * padded, 1) if not isinstance(tensor, list) else 0.0
            for tensor, padded in zip(first.tensors, self._padded, strict=True)
        ]

    def grown(self, request: Request) -> tuple[int, float, float]:
        """Return rows, elements and bytes as they would be with `request` in the batch."""
        rows = self.rows + request.rows
        elements, size = 0.0, float(self._text_bytes + _text_bytes(request))
        for dims, shape, padded, width in zip(
            self._dims, request.shapes, self._padded, self._element_bytes, strict=True
        ):
            if tuple(dims) != shape[1:]:
                padded = volume([max(pair) for pair in zip(dims, shape[1:], strict=True)])
            elements += rows * padded
            size += rows * padded * width
        return rows, elements, size

    def add(self, request: Request) -> None:
        """Take `request` in."""
        self.rows += request.rows
        if self.said is not None and request.cost is not None:
            self.said += request.cost
        self._text_bytes += _text_bytes(request)
        for index, (dims, shape) in enumerate(zip(self._dims, request.shapes, strict=True)):
            if tuple(dims) != shape[1:]:
                self._dims[index] = [max(pair) for pair in zip(dims, shape[1:], strict=True)]
                self._padded[index] = volume(self._dims[index])

    def exceeded(self, request: Request, bounds: Bounds) -> Reason | None:
        """Say which bound the batch would exceed with `request` in it."""
        rows, elements, size = self.grown(request)
        if rows > bounds.rows:
            return Reason.FULL_ROWS
        if size > bounds.bytes:
            return Reason.FULL_BYTES
        if bounds.cost is not None:
            if self.said is not None and request.cost is not None:
                cost = self.said + request.cost
            elif bounds.allowed or bounds.lengths:
                cost = self._as_run(bounds, request)
                if cost <= self._as_run(bounds, None):
                    return None  # it takes a place that would be padding
            else:
                cost = {"rows": float(rows), "elements": elements, "bytes": size}[bounds.cost_unit]
            if cost > bounds.cost:
                return Reason.FULL_COST
        return None

    def _as_run(self, bounds: Bounds, request: Request | None) -> float:
        """Return the cost in the shapes that the model runs in, with one more request in the batch or without."""
        rows = padded_rows(self.rows + (request.rows if request else 0), bounds.allowed)
        if bounds.cost_unit == "rows":
            return rows
        cost = 0.0
        if bounds.cost_unit == "bytes":
            cost = float(self._text_bytes + (_text_bytes(request) if request else 0))
        for index, (own, width) in enumerate(zip(self._dims, self._element_bytes, strict=True)):
            dims = [max(pair) for pair in zip(own, request.shapes[index][1:], strict=True)] if request else list(own)
            for which, axis in bounds.ragged:
                if which == index and bounds.lengths and dims[axis - 1] <= bounds.lengths[-1]:
                    dims[axis - 1] = bound(dims[axis - 1], bounds.lengths)
            cost += rows * volume(dims) * (1.0 if bounds.cost_unit == "elements" else width)
        return cost


def weigher(bounds: Bounds) -> Callable[[Request], float]:
    """Return what a request weighs against a bound on cost, unpadded."""

    def weigh(request: Request) -> float:
        if request.cost is not None:
            return request.cost
        if bounds.cost_unit == "elements":
            return sum(map(volume, request.shapes))
        return request.rows if bounds.cost_unit == "rows" else request.item_bytes

    return weigh


def _text_bytes(request: Request) -> int:
    """Return the bytes of a request's BYTES tensors: they differ row by row, and nothing pads them."""
    numeric = [len(tensor) for tensor in request.tensors if not isinstance(tensor, list)]
    return request.item_bytes - sum(numeric) if len(numeric) < len(request.tensors) else 0
