"""Requests that run together, and how they are cut apart again: along requests, and along rows where one is too large.

Runs in the replica. Pure but for the tensors that it slices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch

from forebay.inference.model import TensorSpec

Inputs = dict[str, Any]


class Group:
    """Requests by their indices in the batch, their rows, and their inputs as they were staged. `bucket`: see caps."""

    __slots__ = ("bucket", "inputs", "requests", "rows", "total")

    def __init__(self, requests: Sequence[int], rows: Sequence[int], inputs: Inputs, bucket: int) -> None:
        self.requests = requests
        self.rows = rows
        self.total = sum(rows)
        self.inputs = inputs
        self.bucket = bucket

    def cut(self, first: int, last: int) -> Group:
        """Return the group of the requests from `first` up to `last`."""
        begin, end = sum(self.rows[:first]), sum(self.rows[:last])
        return Group(self.requests[first:last], self.rows[first:last], self.rows_between(begin, end), self.bucket)

    def rows_between(self, begin: int, end: int) -> Inputs:
        """Return the inputs of some rows."""
        if end - begin == self.total:
            return self.inputs
        return {name: rows_of(value, begin, end, self.total) for name, value in self.inputs.items()}

    def without(self, gone: Collection[int]) -> Group | None:
        """Return the group without some requests; None where nothing is left."""
        kept = [index for index, request in enumerate(self.requests) if request not in gone]
        if len(kept) == len(self.requests):
            return self
        if not kept:
            return None
        pieces = [self.cut(index, index + 1) for index in kept]
        inputs = {name: _joined([piece.inputs[name] for piece in pieces]) for name in self.inputs}
        requests, rows = [self.requests[index] for index in kept], [self.rows[index] for index in kept]
        return Group(requests, rows, inputs, self.bucket)

    def halves(self) -> list[Group]:
        """Return the two halves of the requests."""
        count = len(self.requests)
        return [self.cut(0, count // 2), self.cut(count // 2, count)]

    def within(self, limit: int) -> list[Group]:
        """Return groups of at most `limit` rows, in order; a request that has more stands alone."""
        if self.total <= limit or len(self.requests) == 1:
            return [self]
        cuts, taken = [0], 0
        for index, count in enumerate(self.rows):
            if taken and taken + count > limit:
                cuts.append(index)
                taken = 0
            taken += count
        cuts.append(len(self.rows))
        return [self.cut(first, last) for first, last in pairwise(cuts)]


def rows_of(value: Any, begin: int, end: int, rows: int) -> Any:
    """Cut rows out of an input; a BYTES list may have several elements per row."""
    width = len(value) // rows if isinstance(value, list) and rows else 1
    return value[begin * width : end * width]


def _joined(pieces: list[Any]) -> Any:
    return torch.cat(pieces) if isinstance(pieces[0], torch.Tensor) else [part for piece in pieces for part in piece]


def bucket_of(specs: Sequence[TensorSpec], inputs: Inputs) -> int:
    """Return the bucket of prepared inputs: elements per row of the ragged ones, up to the next power of two."""
    elements = sum(
        prod(inputs[spec.name].shape[1:])
        for spec in specs
        if spec.pad is not None and isinstance(inputs[spec.name], torch.Tensor)
    )
    return 1 << (elements - 1).bit_length() if elements else 0
