"""A batch between its launch and its results: on an accelerator two of them are in the air. Runs in the replica."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from forebay.inference.declared import ContractError
from forebay.inference.devices import LANDED, Landing
from forebay.inference.groups import Group
from forebay.inference.messages import Done, Placed, Run
from forebay.inference.model import TensorSpec
from forebay.inference.slots import Slot
from forebay.inference.staging import join_elements
from forebay.records import Code


class Launch:
    """One group on the device. `rows` is the size of the execution that ran last; `failure` why it has no results.

    `held` are the bytes on the device that stay taken until it has landed.
    """

    __slots__ = (
        "_flags", "_texts", "_views", "began", "beside", "failure", "fits", "group", "held", "landing", "placed",
        "rows", "since",
    )  # fmt: skip

    def __init__(self, group: Group, since: int, beside: bool, outputs: int) -> None:
        self.group = group
        self.since = since
        self.beside = beside
        self.rows = 0
        self.held = 0
        self.began = 0.0
        self.landing: Landing = LANDED
        self.failure: tuple[Code, str] | None = None
        self.fits = 1.0
        self.placed: list[Placed | None] = [None] * outputs
        self._views: dict[int, torch.Tensor] = {}
        self._texts: dict[int, list[bytes]] = {}
        self._flags: list[tuple[int, torch.Tensor | list[bool]]] = []

    def place(self, slot: Slot, index: int, spec: TensorSpec, value: torch.Tensor, begin: int) -> torch.Tensor:
        """Return where an output's rows from `begin` on go: all pieces of a request lie in one tensor."""
        dims = list(value.shape[1:])
        view = self._views.get(index)
        if view is None:
            self.placed[index], view = slot.place(spec, [self.group.total, *dims], self.since)
            self._views[index] = view
        elif list(view.shape[1:]) != dims:
            raise ContractError(
                f"forward() gave {spec.name} rows of {dims} in one piece of a request and of {list(view.shape[1:])} "
                "in another"
            )
        return view[begin : begin + len(value)] if len(value) != self.group.total else view

    def take_text(self, index: int, elements: list[bytes]) -> None:
        """Keep the elements of a BYTES output until all pieces are there."""
        self._texts.setdefault(index, []).extend(elements)

    def write_texts(self, slot: Slot) -> None:
        """Write the BYTES outputs."""
        for index, elements in self._texts.items():
            self.placed[index] = slot.write(join_elements(elements), len(elements), self.since)

    def take_flags(self, begin: int, flags: torch.Tensor | list[bool] | None) -> None:
        """Keep which rows from `begin` on are finite; None: all of them."""
        if flags is not None:
            self._flags.append((begin, flags))

    def finite(self) -> list[bool] | None:
        """Return which rows are finite, once they have landed; None if all are."""
        found: list[bool] | None = None
        for begin, flags in self._flags:
            if isinstance(flags, torch.Tensor):
                if bool(flags.all()):
                    continue
                flags = flags.tolist()
            if found is None:
                found = [True] * self.group.total
            found[begin : begin + len(flags)] = flags
        return found

    def drop(self) -> None:
        """Let go of everything on the device."""
        self.landing = LANDED
        self._views.clear()
        self._texts.clear()
        self._flags.clear()


@dataclass(slots=True)
class Flight:
    """A batch that was begun. `waiting` are the groups that have not run, the next one last."""

    job: Run
    done: Done
    slot: Slot
    began: float
    saved: tuple[dict[int, Any], dict[int, Any]]
    waiting: list[Group] = field(default_factory=list)
    launch: Launch | None = None
    clean: bool = True
    ran: dict[int, int] = field(default_factory=dict)
    bytes_per_row: float = 0.0
