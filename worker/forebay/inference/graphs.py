"""`inference.compile: cudagraph`: each shape of the warm-up recorded once on the device and replayed with one launch.

Runs in the replica's thread. The warm-up runs every shape uncompiled; then the graphs are captured, the largest first,
so that the smaller ones fit into its memory, all in one pool. A replay reads inputs at fixed addresses and overwrites
the outputs of the one before it, so inputs are copied in and outputs out, on the stream that computes. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from forebay.errors import ConfigError, ModelError
from forebay.inference.devices import Accelerator, Device
from forebay.inference.groups import Inputs
from forebay.inference.loading import where
from forebay.inference.messages import Start
from forebay.inference.model import Model

_OFF = "set inference.compile to none or inductor"
Shape = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


class Graphs:
    """A forward as graphs by shape. `fallbacks` counts the calls for which there was none: they ran uncompiled."""

    def __init__(self, model: Model, start: Start, device: Device | None) -> None:
        name = type(model).__name__
        if not isinstance(device, Accelerator):
            raise ConfigError(f"inference.compile cudagraph needs a CUDA device, and inference.device is cpu: {_OFF}")
        if start.sharing > 1:
            raise ConfigError("inference.compile cudagraph needs inference.executor process, or inference.replicas 1")
        if any(spec.datatype == "BYTES" for spec in (*(model.prepared or model.inputs), *model.outputs)):
            raise ConfigError(
                f"inference.compile cudagraph takes tensors only, and {name} has BYTES in forward: {_OFF}"
            )
        self._model = model
        self._device = device
        self._wanted: dict[Shape, Inputs] = {}
        self._graphs: dict[Shape, tuple[Inputs, Callable[[], None], Any]] = {}
        self._frozen = False
        self.fallbacks = 0

    def __call__(self, **inputs: Any) -> Any:
        """Replay the graph of this shape; where there is none, run the model, and remember the shape in the warm-up."""
        shape = tuple((name, value.dtype, tuple(value.shape)) for name, value in inputs.items())
        found = self._graphs.get(shape)
        if found is None:
            if self._frozen:
                self.fallbacks += 1
            elif shape not in self._wanted:
                self._wanted[shape] = {name: value.clone() for name, value in inputs.items()}
            return self._model.forward(**inputs)
        static, replay, outputs = found
        for name, value in inputs.items():
            static[name].copy_(value, non_blocking=True)
        replay()
        return tree_map(_copy, outputs)

    def record(self) -> bool:
        """Capture every shape that has run, the largest first; True: times that were measured before say nothing."""
        shapes = sorted(self._wanted, key=lambda shape: -sum(value.numel() for value in self._wanted[shape].values()))
        for shape in shapes:
            if shape not in self._graphs:
                self._graphs[shape] = self._captured(self._wanted.pop(shape))
        self._wanted.clear()
        return bool(shapes)

    def freeze(self) -> None:
        """Count what has no graph from now on: the warm-up is over."""
        self._frozen = True
        self._wanted.clear()

    def _captured(self, static: Inputs) -> tuple[Inputs, Callable[[], None], Any]:
        try:
            with torch.inference_mode():
                replay, outputs = self._device.capture(lambda: self._model.forward(**static))
        except Exception as error:  # the start ends here, whatever became of the device
            raise ModelError(
                f"inference.compile cudagraph cannot capture {type(self._model).__name__}: {where(error)}; forward "
                f"must neither wait for the device nor read its numbers; or {_OFF}"
            ) from error
        return static, replay, outputs


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
