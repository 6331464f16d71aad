"""A staging slot as the replica sees it: it reads a batch's inputs out of it and writes the outputs behind them."""

from __future__ import annotations

import mmap
from math import prod
from typing import Any

import torch

from forebay.inference.declared import TORCH
from forebay.inference.messages import Placed
from forebay.inference.model import DATATYPE_BYTES, TensorSpec
from forebay.inference.staging import split_elements

_ALIGNMENT = 64


class NoRoomError(Exception):
    """The outputs do not fit into the slot. `fits` is the share of them that would."""

    def __init__(self, size: int, room: int, limit: int) -> None:
        super().__init__(f"the outputs of this batch are larger than a staging slot's {limit} bytes")
        self.fits = room / size


class Slot:
    """One slot. `position` is where the next output goes, from the slot's start."""

    def __init__(self, memory: mmap.mmap, base: int, inputs: int, size: int) -> None:
        self._memory = memory
        self._base = base
        self._inputs = inputs
        self._size = size
        self.position = inputs

    @property
    def room(self) -> int:
        """Bytes that are left for outputs."""
        return self._size - self.position

    def read(self, spec: TensorSpec, place: Placed) -> Any:
        """Return an input where it lies, or the elements of a BYTES one."""
        offset = self._base + place.offset
        if spec.datatype == "BYTES":
            return split_elements(self._memory[offset : offset + place.size])
        return self.view(spec, place.offset, place.dims)

    def view(self, spec: TensorSpec, offset: int, dims: list[int]) -> torch.Tensor:
        """Return a tensor on the slot's own memory."""
        if not prod(dims):  # torch.frombuffer refuses to read nothing
            return torch.empty(dims, dtype=TORCH[spec.datatype])
        flat = torch.frombuffer(self._memory, dtype=TORCH[spec.datatype], count=prod(dims), offset=self._base + offset)
        return flat.view(dims)

    def reserve(self, size: int, since: int) -> int:
        """Take `size` bytes and return where they begin. `since` is where the outputs of this batch began."""
        start = -(-self.position // _ALIGNMENT) * _ALIGNMENT
        if start + size > self._size:
            raise NoRoomError(start + size - since, self._size - since, self._size - self._inputs)
        self.position = start + size
        return start

    def place(self, spec: TensorSpec, dims: list[int], since: int) -> tuple[Placed, torch.Tensor]:
        """Take room for an output and return it as a tensor."""
        size = prod(dims) * DATATYPE_BYTES[spec.datatype]
        start = self.reserve(size, since)
        return Placed(start, size, dims), self.view(spec, start, dims)

    def write(self, raw: bytes, elements: int, since: int) -> Placed:
        """Write a BYTES output."""
        start = self.reserve(len(raw), since)
        self._memory[self._base + start : self._base + start + len(raw)] = raw
        return Placed(start, len(raw), [elements])

    def flags(self, rows: int, since: int) -> torch.Tensor:
        """Take room for one truth value per row, for this side alone."""
        start = self.reserve(rows, since)
        return torch.frombuffer(self._memory, dtype=torch.bool, count=rows, offset=self._base + start)
