"""Loading a model in the process that runs it: import the factory, load, force and verify eval mode.

Imports torch. Every failure is a sentence that names what to mend.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from forebay.errors import ConfigError, ModelError
from forebay.inference.files import open_file
from forebay.inference.messages import Start, encode
from forebay.inference.model import Model, TensorSpec, runs_in_steps
from forebay.inference.precision import check, convert, set_matmul

_MACHINERY = re.compile(r"site-packages|/forebay/inference/|/lib/python3")
_shared: weakref.WeakValueDictionary[bytes, Model] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def load(start: Start, device: torch.device) -> Model:
    """Make, load, convert and check the model that `start` names; `auto` is fp32 here. Raises ConfigError."""
    check(start.precision, device)
    model = load_plain(start, device)
    if start.precision not in ("fp32", "auto"):
        convert_as(model, start)
    return model


def convert_as(model: Model, start: Start) -> None:
    """Convert a loaded model in place to what `start` says. Raises ConfigError where it has nothing to convert."""
    tops = list(modules(model))
    if start.path is not None and not tops and start.precision != "tf32":
        raise ConfigError(
            f"inference.precision is {start.precision}, but {start.path} computes in what it was exported in; export "
            "it in that, and set inference.precision to fp32"
        )
    set_matmul(start.precision)
    convert(tops, start.precision, name_of(model))
    verify_eval(model)


def load_plain(start: Start, device: torch.device) -> Model:
    """Make, load and check the model that `start` names, in fp32. Raises ModelError with one sentence."""
    set_matmul("fp32")
    model = _made(start)
    try:
        model.load(device)
    except Exception as error:
        raise ModelError(f"{name_of(model)}.load() failed: {where(error)}") from error
    if start.weights is not None:
        _load_weights(model, Path(start.weights))
    for module in modules(model):
        _settle_down(module)
    verify_eval(model)
    return model


@contextlib.contextmanager
def sharing(start: Start) -> Iterator[None]:
    """Let the replicas that share a model get ready one after the other: the first loads it."""
    with _sharing if start.sharing > 1 else contextlib.nullcontext():
        yield


def load_shared(start: Start, make: Callable[[], Model]) -> Model:
    """Return the model that another replica of this process has loaded for the same settings, or make it."""
    key = encode(start)
    model = _shared.get(key)
    if model is None:
        model = _shared[key] = make()
    return model


def load_prepare(start: Start) -> Model:
    """Make the model that `start` names and load what its `prepare` needs. Raises ModelError with one sentence."""
    model = _made(start)
    if not model.prepared:
        raise ModelError(
            f"inference.prepare_workers needs a model with prepare(), and {name_of(model)} has none: set it to 0, or "
            "give the model prepare() and prepared = [TensorSpec(…)]"
        )
    try:
        model.load_prepare()
    except Exception as error:
        raise ModelError(f"{name_of(model)}.load_prepare() failed: {where(error)}") from error
    for module in modules(model):
        _settle_down(module)
    return model


def _made(start: Start) -> Model:
    for folder in reversed(start.search):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    model = _make(start)
    _check_declared(model)
    return model


def modules(model: Model) -> Iterator[torch.nn.Module]:
    """Yield the top modules that a model holds."""
    if isinstance(model, torch.nn.Module):
        yield model
        return
    for value in vars(model).values():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for part in held:
            if isinstance(part, torch.nn.Module):
                yield part


def _settle_down(module: torch.nn.Module) -> None:
    """Put a module into eval mode without gradients, one by one: those of TorchScript have no `requires_grad_`."""
    module.eval()
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def verify_eval(model: Model) -> None:
    """Raise ModelError where a module is in training mode: dropout and batch norm would spoil results."""
    for top in modules(model):
        for name, module in top.named_modules():
            if module.training:
                kind = type(module).__name__
                raise ModelError(
                    f"{name_of(model)}: {f'{name} ({kind})' if name else kind} is in training mode, where a request's "
                    "answer depends on who came along with it; load() and forward() must not call train()"
                )


def where(error: BaseException) -> str:
    """Describe an error of the user's code: type, message and the line that raised it."""
    try:
        said = str(error).strip() or "no message"
    except Exception:  # the user's own __str__ raises: its error must not become ours
        said = "its message cannot be shown"
    text = f"{type(error).__name__}: {said}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith("<") and not _MACHINERY.search(frame.filename)]
    if own and not isinstance(error, SyntaxError):  # a syntax error says its own place
        text += f" ({Path(own[-1].filename).name}:{own[-1].lineno})"
    return printable(" ".join(text.split())[:500])


def printable(text: str) -> str:
    """Return a text that UTF-8 can carry: Python puts lone surrogates into names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _make(start: Start) -> Model:
    if start.path is not None:
        return open_file(Path(start.path), start.options)
    module_name, _, attribute = (start.factory or "").partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        raise ModelError(f"model.factory names a module, not a file: write {Path(module_name).stem}:{attribute}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            looked = ", ".join(dict.fromkeys(start.search))
            raise ModelError(
                f"model.factory: there is no module {error.name!r} (looked in {looked} and sys.path)"
            ) from error
        raise ModelError(
            f"model.factory: importing {module_name} failed: {where(error)}; install it in the worker's environment"
        ) from error
    except (Exception, SystemExit) as error:  # a script that was meant to be run, not imported, may exit
        raise ModelError(f"model.factory: importing {module_name} failed: {where(error)}") from error
    factory: Any = module
    for part in attribute.split("."):
        factory = getattr(factory, part, None)
    if factory is None:
        models = [name for name, value in vars(module).items() if _is_own_model(value, module_name)]
        near = difflib.get_close_matches(attribute, vars(module), n=1) or models[:1]
        raise ModelError(
            f"model.factory: {module_name} has no {attribute!r}" + (f"; did you mean {near[0]}?" if near else "")
        )
    if not callable(factory):
        raise ModelError(f"model.factory: {start.factory} is not a class or a function")
    try:
        model = factory(**start.options)
    except Exception as error:
        raise ModelError(f"model.factory: {start.factory} with model.options failed: {where(error)}") from error
    if not isinstance(model, Model):
        raise ModelError(
            f"model.factory: {start.factory} made a {type(model).__name__}; it must be a subclass of forebay.Model, "
            "which may hold a torch module"
        )
    return model


def _is_own_model(value: object, module: str) -> bool:
    return isinstance(value, type) and issubclass(value, Model) and value.__module__ == module


def _check_declared(model: Model) -> None:
    try:
        inspect.signature(model.load).bind(None)
    except TypeError:
        raise ModelError(f"{name_of(model)}.load must take the device: def load(self, device)") from None
    for kind in ("inputs", "outputs"):
        specs = getattr(model, kind, None)
        if not specs or not all(isinstance(spec, TensorSpec) for spec in specs):
            raise ModelError(f"{name_of(model)} must declare {kind} as a list of TensorSpec")
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise ModelError(f"{name_of(model)}: {kind} has the same name twice")
    has_prepare = callable(getattr(model, "prepare", None))
    if has_prepare != bool(model.prepared):
        raise ModelError(f"{name_of(model)} needs both prepare() and prepared = [TensorSpec(…)], or neither")
    called = _check_calls(model)
    taken = inspect.signature(getattr(model, called)).parameters
    given = model.prepared or model.inputs
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        for spec in given:
            if spec.name not in taken:
                raise ModelError(f"{name_of(model)}.{called}() takes no argument {spec.name!r}, which is declared")


def _check_calls(model: Model) -> str:
    """Return which method takes the inputs: `begin` of a model that runs in steps, else `forward`."""
    kind, name = type(model), name_of(model)
    if (kind.step is not Model.step) != (kind.begin is not Model.begin):
        raise ModelError(f"{name} needs both begin() and step(), or neither")
    if runs_in_steps(model) and kind.forward is not Model.forward:
        raise ModelError(f"{name} has forward() and step(): remove step() and begin(), or forward()")
    return "begin" if runs_in_steps(model) else "forward"


def _load_weights(model: Model, path: Path) -> None:
    from safetensors.torch import load_model

    if path.suffix != ".safetensors":
        raise ModelError(f"model.weights {path} must be a .safetensors file")
    tops = list(modules(model))
    if len(tops) != 1:
        raise ModelError(f"model.weights needs a model that holds one module; {name_of(model)} holds {len(tops)}")
    try:
        load_model(tops[0], path)
    except Exception as error:
        raise ModelError(f"model.weights {path} does not fit {name_of(model)}: {where(error)}") from error


def name_of(model: Model) -> str:
    """Return what a model is called in messages."""
    return type(model).__name__
