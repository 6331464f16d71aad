"""What differs between settings, files and signatures: what a reload asks. Pure, but for a look at files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from pydantic import BaseModel

from forebay.records import Request, Signature
from forebay.settings import ModelSettings

_VERSION_HEADERS = ("model-version", "mlserver-version")

Stamp = tuple[int, ...] | None
"""What tells one content of a file from another without reading it: device, inode, size and time; None: no file."""


def differences(old: BaseModel, new: BaseModel, prefix: str = "", apart: Collection[str] = ()) -> Iterator[str]:
    """Yield the dotted keys whose values differ, but for those `apart`."""
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before == after or name in apart:
            continue
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            yield from differences(before, after, f"{prefix}{name}.")
        else:
            yield prefix + name


def files_of(model: ModelSettings) -> tuple[Stamp, ...]:
    """Return marks of a model's files as they are now; the code of a factory is none of them."""
    return tuple(_stamp(path) for path in (model.path, model.weights) if path is not None)


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def other_tensors(old: Signature, new: Signature) -> str:
    """Say how a new model's tensors differ from those for which requests were decoded; empty if they do not."""
    if _tensors(new) == _tensors(old):
        return ""
    return (
        f"it takes or returns other tensors ({_shown(new)}) than the one that serves ({_shown(old)}), and what waits "
        "was decoded for that: restart the worker to serve it"
    )


def names_another(request: Request, version: str) -> bool:
    """Whether a request names a version, and not this one."""
    wanted = version.encode()
    return any(name in _VERSION_HEADERS and value not in (None, wanted) for name, value in request.record.headers)


def _tensors(signature: Signature) -> tuple[object, ...]:
    return (signature.inputs, signature.outputs, signature.prepares, signature.prepared, signature.room)


def _shown(signature: Signature) -> str:
    parts = [signature.inputs, *([signature.prepared] if signature.prepared else []), signature.outputs]
    return " → ".join(", ".join(f"{one.name} {one.datatype} {list(one.shape)}" for one in part) for part in parts)
