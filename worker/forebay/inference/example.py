"""The warm-up example as a witness: does the model itself still work, when every request of a batch has failed?

Runs in the replica, on its one thread. What this module finds decides whether requests are answered with their errors
or wait for the model to be mended, so it must never blame the model for what only an example shows: an output that was
not finite at the start says nothing later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forebay.inference.declared import ContractError, finite_rows
from forebay.inference.devices import is_sticky
from forebay.inference.loading import where
from forebay.inference.model import TensorSpec


class DeviceLost(Exception):
    """The device is lost to this process; the replica must exit and be replaced."""


class Example:
    """One row that the model has run in its warm-up. `run` makes it anew and runs it; without it nothing is known."""

    def __init__(self, run: Callable[[], list[Any]] | None = None, outputs: Sequence[TensorSpec] = ()) -> None:
        self._run = run
        self._outputs = list(outputs)
        self._was_finite = run is not None and self._is_finite(run())

    def complaint(self) -> str:
        """Run the example; return what went wrong, empty if nothing did.

        Raises DeviceLost where no forward can succeed.
        """
        if self._run is None:
            return ""
        try:
            finite = self._is_finite(self._run())
        except Exception as error:
            if is_sticky(error):
                raise DeviceLost(where(error)) from error
            return str(error) if isinstance(error, ContractError) else where(error)
        return "its output has NaN or infinity" if self._was_finite and not finite else ""

    def _is_finite(self, outputs: list[Any]) -> bool:
        return finite_rows(self._outputs, outputs, 1) is None
