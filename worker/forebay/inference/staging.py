"""Staging slots: shared memory in which a batch crosses to its replica, written once, row by row, in the loop.

A replica has a few slots; one is written while another computes. The memory is an unnamed file (memfd): nothing is
left behind by a kill, /dev/shm of a container does not limit it, and pages that no batch has touched cost nothing.
Only numpy here, no torch: the loop stages without it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import numpy as np

from forebay.inference.messages import Placed, Run, Start
from forebay.inference.model import DATATYPE_BYTES
from forebay.records import Batch, Request, Signature, TensorShape

_ALIGNMENT = 64
MARGIN = 65_536
"""Bytes of a slot beyond those of a batch: for what alignment and the lengths of texts add."""
_COPY_DIRECTLY = 8192
NUMPY = {
    "BOOL": "?",
    "FP16": "<f2",
    "BF16": "<u2",
    "FP32": "<f4",
    "FP64": "<f8",
    **{f"INT{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True, slots=True)
class SlotSize:
    """How one slot is divided: `inputs` bytes, then `outputs` bytes."""

    inputs: int
    outputs: int

    @property
    def total(self) -> int:
        """Bytes of the slot."""
        return self.inputs + self.outputs


def spare(rows: int) -> int:
    """Return how many rows wait in the replica behind `rows` that run in steps, to join without a word of the loop."""
    return max(rows // 8, 1)


def slots_of(start: Start) -> int:
    """Return the slots of a model whose rows join what runs: one per row, those that wait, and the canary's."""
    return start.max_batch_size + spare(start.max_batch_size) + 1


def divide(size: SlotSize, start: Start) -> SlotSize:
    """Return how large each of them is: together they have the memory of the slots that batches would be staged in."""
    slots = slots_of(start)

    def share(part: int) -> int:
        return part * start.slots // slots // _ALIGNMENT * _ALIGNMENT

    return SlotSize(share(size.inputs), share(size.outputs))


def create_memory(size: int) -> int:
    """Return the descriptor of an unnamed file of `size` bytes that processes can share."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("forebay-staging")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    os.set_inheritable(descriptor, True)
    return descriptor


class Staging:
    """The slots of one replica, as the loop sees them."""

    def __init__(self, size: SlotSize, slots: int) -> None:
        self.size = size
        self.slots = slots
        self.descriptor = create_memory(size.total * slots)
        self.map = mmap.mmap(self.descriptor, size.total * slots)
        self._view = memoryview(self.map)
        self._free = list(range(slots))

    @property
    def free(self) -> int:
        """Slots that no batch is in."""
        return len(self._free)

    def divide(self, start: Start) -> None:
        """Make the slots of `start`, for batches, those of a model whose rows join what runs; no batch is in any."""
        if self.slots != slots_of(start):
            self.size, self.slots = divide(self.size, start), slots_of(start)
            self.reset()

    def room(self, inputs: int) -> int:
        """Return the bytes that one request of so many inputs may have in a slot of its own."""
        return self.size.inputs - inputs * _ALIGNMENT

    def take(self) -> int:
        """Return a free slot, for the replica to write into."""
        return self._free.pop()

    def write(self, batch: Batch, signature: Signature) -> Run:
        """Put a batch into a free slot and return the message that tells the replica so."""
        slot = self._free.pop()
        start = slot * self.size.total
        requests = batch.requests
        rows = [] if batch.rows == len(requests) else [request.rows for request in requests]
        placed: list[Placed] = []
        position = 0
        for index, spec in enumerate(signature.inputs):
            place = self._write_input(start, position, index, spec, batch, signature.prepares)
            placed.append(place)
            # The batcher's bounds see to this; beyond here lie outputs, then another batch's slot.
            assert place.offset + place.size <= self.size.inputs, f"batch {batch.number} does not fit into its slot"
            position = -(-(place.offset + place.size) // _ALIGNMENT) * _ALIGNMENT
        shapes = [[list(shape) for shape in request.shapes] for request in requests] if signature.prepares else []
        return Run(batch.number, slot, len(requests), rows, placed, shapes, batch.bucket)

    def _write_input(
        self, start: int, position: int, index: int, spec: TensorShape, batch: Batch, separate: bool
    ) -> Placed:
        requests = batch.requests
        if spec.datatype == "BYTES":
            lists = [request.tensors[index] for request in requests]
            raw = join_elements([element for elements in lists for element in cast(list[bytes], elements)])
            self._put(start + position, raw)
            return Placed(position, len(raw), [batch.rows, *requests[0].shapes[index][1:]])
        first = requests[0].shapes[index][1:]
        if separate or -1 not in spec.shape[1:] or all(request.shapes[index][1:] == first for request in requests):
            size = self._write_stacked(start + position, [request.tensors[index] for request in requests])
            return Placed(position, size, [batch.rows, *first])
        dims = [max(pair) for pair in zip(*[request.shapes[index][1:] for request in requests], strict=True)]
        shape = [batch.rows, *dims]
        size = prod(shape) * DATATYPE_BYTES[spec.datatype]
        self._write_padded(start + position, shape, index, spec, requests)
        return Placed(position, size, shape)

    def _put(self, position: int, raw: bytes) -> None:
        self._view[position : position + len(raw)] = raw

    def _write_stacked(self, position: int, tensors: Sequence[Any]) -> int:
        """Write tensors one after the other: small ones in one piece, large ones without a copy in between."""
        if len(tensors[0]) < _COPY_DIRECTLY:
            raw = b"".join(tensors)
            self._put(position, raw)
            return len(raw)
        start = position
        for tensor in tensors:
            end = position + len(tensor)
            self._view[position:end] = tensor
            position = end
        return position - start

    def _write_padded(
        self, position: int, shape: list[int], index: int, spec: TensorShape, requests: list[Request]
    ) -> None:
        dtype = np.dtype(NUMPY[spec.datatype])
        target = np.frombuffer(self._view, dtype, prod(shape), position).reshape(shape)
        target[...] = _pad_value(spec)
        row = 0
        for request in requests:
            own = request.shapes[index]
            window = (slice(row, row + own[0]), *[slice(0, dim) for dim in own[1:]])
            target[window] = np.frombuffer(request.tensors[index], dtype).reshape(own)  # type: ignore[arg-type]
            row += own[0]

    def read(self, slot: int, place: Placed, is_bytes: bool) -> bytes | list[bytes]:
        """Copy an output out of a slot."""
        start = slot * self.size.total + place.offset
        raw = self.map[start : start + place.size]
        return split_elements(raw) if is_bytes else raw

    def release(self, slot: int) -> None:
        """Let the next batch use a slot."""
        self._free.append(slot)

    def reset(self) -> None:
        """Free every slot: the replica that used them is gone."""
        self._free = list(range(self.slots))

    def close(self) -> None:
        """Give the memory back."""
        with contextlib.suppress(BufferError):  # a thread replica that hangs still holds it
            self._view.release()
            self.map.close()
        os.close(self.descriptor)


def join_elements(elements: Sequence[bytes]) -> bytes:
    """Write a BYTES tensor: each element with a 4-byte little-endian length in front."""
    return b"".join([len(element).to_bytes(4, "little") + element for element in elements])


def split_elements(raw: bytes | memoryview) -> list[bytes]:
    """Split what `join_elements` wrote."""
    found: list[bytes] = []
    position, end = 0, len(raw)
    while position < end:
        length = int.from_bytes(raw[position : position + 4], "little")
        position += 4
        found.append(bytes(raw[position : position + length]))
        position += length
    return found


def _pad_value(spec: TensorShape) -> Any:
    value = spec.pad or 0
    if spec.datatype != "BF16":
        return value
    return int(np.float32(value).view(np.uint32) + 0x7FFF) >> 16
