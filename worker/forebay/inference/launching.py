"""Launching: a group to the device, through the model and on its way back to the slot. Runs in the replica's thread.

Nothing here waits for an accelerator, except between two pieces of one large request. A failure leaves as text, outside
of the `except` block: the exception's frames would keep the failed batch's memory alive.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from forebay.inference.caps import Caps
from forebay.inference.declared import ContractError, finite_flags, finite_rows
from forebay.inference.devices import Device, is_out_of_memory, is_sticky
from forebay.inference.devices.cpu import Copy
from forebay.inference.example import DeviceLost
from forebay.inference.flights import Flight, Launch
from forebay.inference.forwarding import Forward
from forebay.inference.groups import Group, Inputs
from forebay.inference.loading import where
from forebay.inference.model import TensorSpec
from forebay.inference.peaks import Peaks
from forebay.inference.slots import NoRoomError, Slot
from forebay.records import Code


class Launcher:
    """Launches groups on one device; `caps` are those of its memory."""

    def __init__(self, device: Device, forward: Forward, outputs: Sequence[TensorSpec], caps: Caps) -> None:
        self._device = device
        self._forward = forward
        self._outputs = list(outputs)
        self._caps = caps
        self.peaks = Peaks()
        self._busy_until = 0.0

    def limit(self, bucket: int) -> int:
        """Return the most rows of one execution."""
        return self._forward.limit(self.peaks.rows(bucket, self._caps.rows(bucket)))

    def fits_beside(self, group: Group, taken: int) -> bool:
        """Whether a group's first execution fits while another one keeps `taken` bytes of the device."""
        rows = min(group.total, self.limit(group.bucket))
        return self.peaks.fits(group.bucket, self._forward.size(rows), taken)

    def launch(self, flight: Flight, group: Group, beside: bool = False) -> Launch:
        """Launch a group; what failed about it is text when this returns, and its memory is free."""
        launch = Launch(group, flight.slot.position, beside, len(self._outputs))
        try:
            self._launch_pieces(flight, launch)
        except Exception as error:
            if is_sticky(error):
                raise DeviceLost(where(error)) from error
            launch.failure = failure_of(error)
            launch.fits = error.fits if isinstance(error, NoRoomError) else 1.0
        if launch.failure is not None:
            self.abandon()
            launch.drop()
        return launch

    def is_landed(self, launch: Launch) -> bool:
        """Whether the results of a launch are there, or are known not to come."""
        try:
            return launch.failure is not None or launch.landing.is_done()
        except Exception as error:  # an asynchronous failure, whatever its type: nothing on the device can be trusted
            raise DeviceLost(where(error)) from error

    def land(self, flight: Flight, launch: Launch) -> None:
        """Wait until the results of a launch are in the slot."""
        try:
            launch.landing.wait()
        except Exception as error:
            raise DeviceLost(where(error)) from error
        if self._device.overlaps:
            now = time.perf_counter()
            flight.done.forward_seconds += now - max(launch.began, self._busy_until)
            self._busy_until = now

    def trial(self, inputs: Inputs, rows: int) -> list[Any]:
        """Run rows that belong to no request, all the way to the device and back; return their outputs on the host."""
        copied = self._device.upload(inputs)
        try:
            with self._device.computing():
                outputs = self._forward(copied, rows)
                if self._device.overlaps:
                    finite_flags(self._outputs, outputs, rows)  # for what it takes: a real batch has them, too
        except Exception:
            self._device.abandon()
            raise
        home = [
            torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for value in outputs
        ]
        copies = [(out, place) for out, place in zip(outputs, home, strict=True) if isinstance(out, torch.Tensor)]
        self._device.download(copies, copied).wait()
        return home

    def abandon(self) -> None:
        """Take note that a call failed. Raises DeviceLost where no call can succeed."""
        try:
            self._device.abandon()
        except Exception as error:
            raise DeviceLost(where(error)) from error

    def _launch_pieces(self, flight: Flight, launch: Launch) -> None:
        """Launch a group's rows, in pieces where one request has more of them than fit."""
        rows, limit = launch.group.total, self.limit(launch.group.bucket)
        for begin in range(0, rows, limit):
            end = min(begin + limit, rows)
            launch.landing.wait()
            launch.rows = end - begin
            self._launch_piece(flight, launch, begin, launch.group.rows_between(begin, end))
        launch.write_texts(flight.slot)

    def _launch_piece(self, flight: Flight, launch: Launch, begin: int, staged: Inputs) -> None:
        done, device, rows = flight.done, self._device, launch.rows
        started = time.perf_counter()
        inputs = device.upload(staged)  # for every try afresh: the model may have written into the last copy
        launch.began = time.perf_counter()
        done.stage_seconds += launch.began - started
        done.executions += 1
        flags: torch.Tensor | list[bool] | None
        with device.computing():
            outputs = self._forward(inputs, rows)
            flags = (finite_flags if device.overlaps else finite_rows)(self._outputs, outputs, rows)
        if not device.overlaps:
            done.forward_seconds += time.perf_counter() - launch.began
        copies: list[Copy] = []
        for index, (spec, value) in enumerate(zip(self._outputs, outputs, strict=True)):
            if spec.datatype == "BYTES":
                launch.take_text(index, value)
            else:
                copies.append((value, launch.place(flight.slot, index, spec, value, begin)))
        if isinstance(flags, torch.Tensor):
            flags = _flags_home(flight.slot, launch, flags, copies)
        launch.take_flags(begin, flags)
        launch.landing = device.download(copies, (inputs, staged))  # a copy in may still read what is not page-locked
        if self.peaks.room is not None:
            launch.held = _held(inputs.values()) + _held(result for result, _ in copies)


def _flags_home(slot: Slot, launch: Launch, flags: torch.Tensor, copies: list[Copy]) -> torch.Tensor:
    """Let the flags travel with the outputs, into the slot's own page-locked memory."""
    place = slot.flags(len(flags), launch.since)
    copies.append((flags, place))
    return place


def _held(values: Iterable[Any]) -> int:
    """Return the bytes that tensors keep alive; one may be a view of something larger."""
    return sum(value.untyped_storage().nbytes() for value in values if isinstance(value, torch.Tensor))


def failure_of(error: Exception) -> tuple[Code, str]:
    """Return the code and the text of a failure; nothing of the exception itself is kept."""
    code = Code.MODEL_ERROR
    if is_out_of_memory(error):
        code = Code.RESOURCE_EXHAUSTED
    elif isinstance(error, NoRoomError):
        code = Code.RESULT_TOO_LARGE
    return code, str(error) if isinstance(error, ContractError | NoRoomError) else where(error)
