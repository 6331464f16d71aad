"""The allocator of the fake accelerator: it counts what torch operations really keep alive, and refuses above a limit.

A retry that still holds the failed try's tensors, through a frame or an exception, therefore fails here as it would on
a GPU. Counts the storages that operations make inside `with` and the copies that are brought in; imports torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeAllocator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes. `limit` None has room for everything."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self.live = 0
        self.highest = 0
        self.reserved = 0
        self.refused = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare the first forward the seconds that torch takes to import its compiler, only to leave it out here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the memory of its results."""
        returned = func(*args, **(kwargs or {}))
        for value in tree_leaves(returned):
            if isinstance(value, torch.Tensor):
                self.count(value)
        return returned

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's memory until nobody holds it. Raises torch.OutOfMemoryError above the limit."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        if self.limit is not None and self.live + size > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError(
                f"fake accelerator out of memory: tried to allocate {size} bytes, {self.live} of {self.limit} are taken"
            )
        self._known[key] = weakref.ref(storage, self._freed(key, size))
        self.live += size
        self.highest = max(self.highest, self.live)
        self.reserved = max(self.reserved, self.live)

    def _freed(self, key: int, size: int) -> Callable[[Any], None]:
        def free(_: Any) -> None:
            self.live -= size
            self._known.pop(key, None)

        return free
