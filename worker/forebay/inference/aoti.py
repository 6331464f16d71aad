"""`inference.compile: aoti`: the model's forward as a package of native code, made at the first start and kept.

Runs in the replica's thread. The warm-up's first batch is exported with any number of rows, compiled, and compared with
the model; later starts find the package by a hash of the program, its weights and the machine. Its inputs are always
checked: by itself such a package computes wrong values for a wrong shape in silence. Imports torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forebay.errors import ConfigError, ModelError
from forebay.inference import cache
from forebay.inference.declared import as_declared
from forebay.inference.devices import is_out_of_memory, is_sticky
from forebay.inference.golden import deviation
from forebay.inference.groups import Inputs
from forebay.inference.loading import modules, where
from forebay.inference.messages import Start
from forebay.inference.model import Model
from forebay.inference.precision import REDUCED, tolerance, uses_tf32

LEAST_ROWS = 2
"""The compiler takes dimensions of 1 for constants; a batch of one row runs as two."""

_MANY = 0.5
_KEPT_SECONDS = 90 * 86_400
_OFF = "set inference.compile to none or inductor"


def load_package(path: Path, device: torch.device) -> Callable[..., Any]:
    """Load a package so that it checks its inputs. Raises RuntimeError where it cannot be read.

    One of its runners begins a batch only when the one before has ended, and holds the thread until then: on a device
    with streams it has two, with one set of weights, so that the next batch is launched while another computes.
    """
    from torch._inductor.package.package import load_package as load

    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"  # before the first package of this process is loaded
    return load(str(path), num_runners=1 if device.type == "cpu" else 2)


class Packaged:
    """A forward as an AOTInductor package. `fallbacks` counts the calls for which it had no shape: they ran eagerly."""

    def __init__(self, model: Model, start: Start) -> None:
        name = type(model).__name__
        if start.sharing > 1:
            raise ConfigError(
                "inference.compile aoti needs inference.executor process, or one replica: threads would share it"
            )
        if any(spec.datatype == "BYTES" for spec in (*(model.prepared or model.inputs), *model.outputs)):
            raise ConfigError(
                f"inference.compile aoti compiles tensors alone, and {name} has BYTES in its forward: {_OFF}"
            )
        self._model = model
        self._start = start
        self._package: Callable[..., Any] | None = None
        self._frozen = False
        self.fallbacks = 0

    def __call__(self, **inputs: Any) -> Any:
        """Run the package, made at the first call; where it refuses a shape after the warm-up, the model itself."""
        if self._package is None:
            with torch.inference_mode(False), torch.no_grad():  # export takes no tensor of inference mode
                self._package = self._made({name: value.clone() for name, value in inputs.items()})
        try:
            return self._package(**inputs)
        except RuntimeError as error:
            if is_sticky(error) or is_out_of_memory(error):
                raise
            if not self._frozen:
                raise ModelError(
                    f"inference.compile aoti: the package refuses a batch ({where(error)}); {_OFF}"
                ) from error
        self.fallbacks += 1
        return self._model.forward(**inputs)

    def record(self) -> bool:
        """Return False: the first call of the warm-up made the package."""
        return False

    def freeze(self) -> None:
        """Count what the package refuses from now on: the warm-up is over."""
        self._frozen = True

    def _made(self, inputs: Inputs) -> Callable[..., Any]:
        example = _example(inputs, max(self._start.max_batch_size, LEAST_ROWS))
        program = self._exported(example)
        place = cache.folder(self._start.cache_dir, "aoti")
        device = next(iter(example.values())).device
        path = place / f"{_key(program, self._start, device)}.pt2"
        with cache.locked(path):
            if not path.exists():
                cache.forget_older(place, _KEPT_SECONDS)
                self._compile(program, path)
            path.touch()
            try:
                package = load_package(path, device)
            except RuntimeError:  # it was damaged, or a library that it needs was replaced: it is a cache
                path.unlink()
                self._compile(program, path)
                package = load_package(path, device)
        self._compare(package, example)
        return package

    def _exported(self, example: Inputs) -> Any:
        rows = torch.export.Dim("rows", min=1, max=max(self._start.max_batch_size, LEAST_ROWS, *self._start.sizes))
        ragged = {spec.name: spec.shape for spec in self._model.prepared or self._model.inputs}
        free = {
            name: {axis: torch.export.Dim.AUTO for axis, dim in enumerate(ragged[name]) if dim == -1} | {0: rows}
            for name in example
        }
        try:
            return torch.export.export(_Exportable(self._model), (), dict(example), dynamic_shapes={"inputs": free})
        except Exception as error:
            raise ModelError(
                f"inference.compile aoti: torch.export cannot export {type(self._model).__name__} for any batch size: "
                f"{_short(error)}; {_OFF}"
            ) from error

    def _compile(self, program: Any, path: Path) -> None:
        part = path.with_name(f"{path.stem}.{os.getpid()}.pt2")
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=str(part))
            part.replace(path)
        except Exception as error:
            raise ModelError(
                f"inference.compile aoti cannot compile {type(self._model).__name__}: {_short(error)}; {_OFF}"
            ) from error
        finally:
            part.unlink(missing_ok=True)

    def _compare(self, package: Callable[..., Any], example: Inputs) -> None:
        """Raise ModelError where the package computes something else than the model."""
        specs = list(self._model.outputs)
        rows = len(next(iter(example.values())))
        made = []
        for call in (self._model.forward, package):
            with torch.inference_mode():
                returned = call(**{name: value.clone() for name, value in example.items()})
            named = returned if isinstance(returned, Mapping) else {specs[0].name: returned}
            made.append([as_declared(spec, named[spec.name], rows) for spec in specs])
        most = max(tolerance(self._start.precision), REDUCED)
        for spec, one, other in zip(specs, *made, strict=True):
            apart = deviation([spec], [one], [other])
            if apart > (most if one.is_floating_point() else _MANY):  # near a tie a label may fall either way
                raise ModelError(
                    f"inference.compile aoti: the package gives another {spec.name} than the model (they differ by "
                    f"{apart:.2g}); {_OFF}"
                )


class _Exportable(nn.Module):
    """A model as the module that torch.export wants; its own modules are below it, so that their weights are found."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules(model))
        self._call = [model.forward]

    def forward(self, **inputs: Any) -> Any:
        return self._call[0](**inputs)


def _example(inputs: Inputs, most: int) -> Inputs:
    """Return a batch with a number of rows that no other dimension has: export takes equal ones for the same."""
    taken = {dim for value in inputs.values() for dim in value.shape[1:]}
    rows = next((count for count in range(LEAST_ROWS, most + 1) if count not in taken), LEAST_ROWS)
    return {name: value[torch.arange(rows, device=value.device) % len(value)] for name, value in inputs.items()}


def _key(program: Any, start: Start, device: torch.device) -> str:
    """Hash everything that the package's code and its weights come from."""
    told = [torch.__version__, platform.machine(), str(torch.get_num_threads()), start.precision]
    told += [torch.backends.cpu.get_cpu_capability(), str(uses_tf32()), device.type]
    if device.type == "cuda":
        told += [torch.cuda.get_device_name(device), str(torch.cuda.get_device_capability(device))]
    told += [program.graph_module.code, str(program.range_constraints)]
    told += [
        f"{node.name} {value.shape} {value.dtype} {value.stride()}"
        for node in program.graph.nodes
        if node.op == "placeholder" and isinstance(value := node.meta.get("val"), torch.Tensor)
    ]
    digest = hashlib.sha256("\0".join(told).encode())
    for name, value in sorted({**program.state_dict, **program.constants}.items()):
        digest.update(name.encode())
        for part in _plain(value):
            raw = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode() + raw.numpy().tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a weight is made of: a quantised one has several."""
    if not isinstance(value, torch.Tensor):
        return
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None:
        yield value
        return
    for name in flatten()[0]:
        yield from _plain(getattr(value, name))


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
