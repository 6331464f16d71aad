"""Forebay: a Kafka consumer for batched PyTorch inference.

`from forebay import Model, TensorSpec` is all that a model needs. Importing the package costs no torch and no
Kafka client; both come with the room that uses them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.inference.model import Model, TensorSpec

__all__ = ["Model", "TensorSpec", "__version__"]

try:
    __version__ = version("forebay")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"


def __getattr__(name: str) -> object:
    if name in ("Model", "TensorSpec"):
        from forebay.inference import model

        return getattr(model, name)
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")
