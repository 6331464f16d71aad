"""Capture and replay on the fake accelerator: operations are written down with their tensors and done again on them.

As on a GPU, a replay knows nothing of the Python around the operations, reads and writes the addresses of the capture,
and what would wait for the device cannot be captured. Imports torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::is_nonzero", "aten::equal")


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what happens inside `with`, once; `replay` does it again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[tuple[Any, Any, Any, Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare the first forward the import of torch's compiler: see FakeAllocator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and write it down. Raises RuntimeError for one that waits for the device."""
        if func.name().partition(".")[0] in _WAITING:
            raise RuntimeError(f"fake accelerator: {func.name()} is not permitted when a stream is capturing")
        returned = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, returned))
        return returned

    def replay(self) -> None:
        """Do every operation again, with the results where they were."""
        for func, args, kwargs, returned in self._steps:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(returned), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
