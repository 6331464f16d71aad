"""What stands in front of a model's forward, so that nothing runs uncompiled without being counted. Imports torch.

torch.compile falls back to eager for good, with one warning, once a function has more variants than a limit. Here the
limit is an error; and when the warm-up is over, a shape that needs another variant runs eagerly that once and is
counted, since compiling it would hold the replica up for longer than a hang may last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from forebay.errors import ConfigError, ModelError
from forebay.inference.devices.cpu import Device
from forebay.inference.messages import Start
from forebay.inference.model import Model

_SPARE = 8
_WOULD_RECOMPILE = "torch.compile stance is 'fail_on_recompile'"


class Faster(Protocol):
    """A forward that is compiled, whichever way. `fallbacks` counts the calls that ran eagerly."""

    fallbacks: int

    def __call__(self, **inputs: Any) -> Any: ...
    def record(self) -> bool: ...
    def freeze(self) -> None: ...


def compiled(model: Model, start: Start, device: Device | None = None) -> Faster | None:
    """Return what runs in place of the model's forward, None where that runs itself. Raises ConfigError."""
    if start.compile == "none":
        return None
    if start.compile == "aoti":
        from forebay.inference.aoti import Packaged

        return Packaged(model, start)
    if start.compile == "cudagraph":
        from forebay.inference.graphs import Graphs

        return Graphs(model, start, device)
    return Compiled(model.forward, start)


def least_rows(start: Start) -> int:
    """Return the fewest rows that a compiled forward takes."""
    return 2 if start.compile == "aoti" else 1


class Compiled:
    """A forward that is compiled for the shapes of the warm-up. `fallbacks` counts the calls that ran eagerly."""

    def __init__(self, forward: Callable[..., Any], start: Start) -> None:
        if start.compile != "inductor":
            raise ConfigError(
                f"inference.compile {start.compile!r} is not supported; use none, inductor, aoti or cudagraph"
            )
        self._eager = forward
        self._variants = variants(start)
        _raise_the_limits(self._variants)
        self._compiled = _compile(forward, self._variants)
        self.fallbacks = 0

    def __call__(self, **inputs: Any) -> Any:
        """Run the compiled forward, or the eager one where no variant fits."""
        try:
            return self._compiled(**inputs)
        except RuntimeError as error:
            if _WOULD_RECOMPILE not in str(error):
                raise
        self.fallbacks += 1
        return self._eager(**inputs)

    def record(self) -> bool:
        """Return False: a shape is compiled when it runs, and the best time of several is not that."""
        return False

    def freeze(self) -> None:
        """Compile nothing any more, in no thread of this process: the warm-up is over."""
        torch.compiler.set_stance("fail_on_recompile")


def variants(start: Start) -> int:
    """Return how many variants the warm-up may need: one per size and bucket, and a few for what else differs."""
    sizes = len(start.sizes) or start.max_batch_size.bit_length() + 1
    return sizes * max(len(start.buckets), 1) + _SPARE


def thaw() -> None:
    """Allow compiling again: a model begins its warm-up."""
    torch.compiler.set_stance("default")


def check(error: Exception) -> ModelError | None:
    """Return what a failure to compile means for the start, None where the error is another one."""
    if isinstance(error, ModelError):
        return error
    module = type(error).__module__
    if not module.startswith(("torch._dynamo", "torch._inductor")):
        return None
    said = " ".join(str(error).split())[:300]
    return ModelError(f"inference.compile inductor cannot compile the model: {said}; set inference.compile to none")


def _raise_the_limits(count: int) -> None:
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 16 * count)
    config.fail_on_recompile_limit_hit = True
    config.suppress_errors = False


def _compile(forward: Callable[..., Any], count: int) -> Callable[..., Any]:
    compiling: Any = torch.compile
    try:
        return compiling(forward, recompile_limit=count, isolate_recompiles=True)  # type: ignore[no-any-return]
    except TypeError:  # torch before 2.13 has one limit for all
        return compiling(forward)  # type: ignore[no-any-return]
