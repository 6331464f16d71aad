"""Models from files, without code of the user's: a torch.export `.pt2` or a TorchScript `.pt`. Imports torch.

An exported program says its own signature. A TorchScript file and an AOTInductor package do not: `model.options` then
declares `inputs` and `outputs`, each a list of name, datatype and shape. Nothing is unpickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from forebay.errors import ModelError
from forebay.inference.declared import TORCH
from forebay.inference.model import Model, TensorSpec

_TOO_SMALL = "dim value is too small"
_DATATYPES = {dtype: name for name, dtype in TORCH.items()}


class FileModel(Model):
    """A model that a file holds. `options` may declare `inputs` and `outputs`, or just name the outputs."""

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        unknown = set(options) - {"inputs", "outputs"}
        if unknown:
            raise ModelError(f"model.options of a file may have inputs and outputs, not {', '.join(sorted(unknown))}")
        self._path = path
        self._options = options
        self._program: Any = None
        self._call: Callable[..., Any] | None = None
        self.is_quantised = False
        if path.suffix == ".pt2":
            self._program = _read_export(path)
        if self._program is not None:
            self.is_quantised = any("quantize" in str(node.target) for node in self._program.graph.nodes)
            self.inputs = _exported_inputs(path, self._program)
            self.outputs = _exported_outputs(path, self._program, options.get("outputs"))
        else:
            self.inputs = _declared(path, options, "inputs")
            self.outputs = _declared(path, options, "outputs")

    def load(self, device: torch.device) -> None:
        """Read the file, and move what it holds to the device."""
        if self._program is not None:
            program = self._program
            if device.type != "cpu":
                from torch.export.passes import move_to_device_pass

                program = move_to_device_pass(program, device)
            self._call = program.module().forward
            self._program = None
        elif self._path.suffix == ".pt2":
            from forebay.inference.aoti import load_package

            self._call = _OneRowAsTwo(load_package(self._path, device))
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # TorchScript is deprecated upstream; the documentation says so
                module = torch.jit.load(str(self._path), map_location=device)  # type: ignore[no-untyped-call]
            self._module = module.eval()
            self.is_quantised = "quantized::" in str(module.inlined_graph)
            self._call = module.__call__

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Run a batch, and name what comes back by the declared outputs."""
        assert self._call is not None
        returned = self._call(*[inputs[spec.name] for spec in self.inputs])
        if isinstance(returned, Mapping):
            return returned
        values = returned if isinstance(returned, tuple | list) else (returned,)
        if len(values) != len(self.outputs):
            raise ValueError(f"the file returned {len(values)} outputs, declared are {len(self.outputs)}")
        return {spec.name: value for spec, value in zip(self.outputs, values, strict=True)}


class _OneRowAsTwo:
    """An AOTInductor package: where it was exported with any number of rows it takes two at least, as compilers do."""

    def __init__(self, package: Callable[..., Any]) -> None:
        self._package = package
        self._least = 1

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run a batch, a single row beside a copy of itself where the package refuses it alone."""
        if len(inputs[0]) >= self._least:
            try:
                return self._package(*inputs)
            except RuntimeError as error:
                if len(inputs[0]) != 1 or _TOO_SMALL not in str(error):
                    raise
        returned = self._package(*[torch.cat([value, value]) for value in inputs])
        self._least = 2
        return tree_map(lambda value: value[:1], returned)


def open_file(path: Path, options: Mapping[str, Any]) -> FileModel:
    """Return the model in a file, not loaded. Raises ModelError with one sentence."""
    if not path.is_file():
        raise ModelError(f"model.path: there is no file {path}")
    if path.suffix not in (".pt2", ".pt"):
        raise ModelError(f"model.path {path}: files are .pt2 (torch.export, AOTInductor) or .pt (TorchScript)")
    return FileModel(path, options)


def _read_export(path: Path) -> Any:
    """Return the exported program; None where the file is an AOTInductor package."""
    try:
        return torch.export.load(str(path))
    except Exception as error:
        import zipfile

        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any("aotinductor" in name for name in archive.namelist()):
                    return None
        raise ModelError(f"model.path {path} is not a readable .pt2: {type(error).__name__}: {error}") from error


def _exported_inputs(path: Path, program: Any) -> list[TensorSpec]:
    wanted = program.graph_signature.user_inputs
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return [_spec(path, name, nodes[name].meta["val"]) for name in wanted]


def _exported_outputs(path: Path, program: Any, names: Any) -> list[TensorSpec]:
    [output] = [node for node in program.graph.nodes if node.op == "output"]
    nodes = {node.name: node for node in output.args[0]}
    found = [nodes[name] for name in program.graph_signature.user_outputs]
    keys = program.call_spec.out_spec.context
    if not isinstance(names, list):
        names = keys if isinstance(keys, list) and len(keys) == len(found) else None
    if names is None:
        names = ["output"] if len(found) == 1 else [f"output{number}" for number in range(len(found))]
    if len(names) != len(found):
        raise ModelError(f"model.options.outputs names {len(names)} outputs, {path} has {len(found)}")
    return [_spec(path, str(name), node.meta["val"]) for name, node in zip(names, found, strict=True)]


def _spec(path: Path, name: str, value: Any) -> TensorSpec:
    shape = [dim if isinstance(dim, int) else -1 for dim in value.shape]
    if not shape or shape[0] != -1:
        raise ModelError(
            f"model.path {path}: {name} was exported with a fixed first dimension; export it with "
            f"dynamic_shapes={{…: {{0: torch.export.Dim('rows')}}}}, so that it takes batches of any size"
        )
    datatype = _DATATYPES.get(value.dtype)
    if datatype is None:
        raise ModelError(f"model.path {path}: {name} is {value.dtype}, which has no datatype on the wire")
    return TensorSpec(name, datatype, shape)


def _declared(path: Path, options: Mapping[str, Any], kind: str) -> list[TensorSpec]:
    entries = options.get(kind)
    if not isinstance(entries, Sequence) or not entries or not all(isinstance(entry, Mapping) for entry in entries):
        raise ModelError(
            f"model.path {path} does not say its {kind}: set model.options.{kind} to a list of "
            "{name: x, datatype: FP32, shape: [-1, 4]}"
        )
    try:
        return [TensorSpec(**entry) for entry in entries]
    except (TypeError, ValueError) as error:
        raise ModelError(f"model.options.{kind}: {error}") from error
