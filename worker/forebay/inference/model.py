"""What a user writes: a `Model` with its declared tensors. Imports no torch, so that declaring costs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.records import TensorShape

if TYPE_CHECKING:
    import torch

DATATYPE_BYTES = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
    "BYTES": 0,
}
"""Bytes of one element of each Open Inference Protocol datatype; BYTES elements vary."""

MOST_STEPS = 4096
"""Steps that a row of a model which runs in steps may take, by default."""


_NUMPY_NAMES = {
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float": "FP32",
    "float64": "FP64",
    "double": "FP64",
    "string": "BYTES",
    "str": "BYTES",
    "int": "INT64",
    **{name.lower(): name for name in DATATYPE_BYTES},
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Declares one tensor of a model.

    `datatype` is an Open Inference Protocol name (FP32, UINT8, BYTES …). `shape` starts with -1, the rows; a
    further -1 is a dimension that varies between requests. Requests whose variable dimensions differ share a
    batch only where `pad` gives the value to fill with; the model then masks it.
    Raises ValueError for an unknown datatype or an impossible shape.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    pad: float | None = None

    def __post_init__(self) -> None:
        if self.datatype not in DATATYPE_BYTES:
            near = _NUMPY_NAMES.get(self.datatype.lower()) if isinstance(self.datatype, str) else None
            meant = f"; did you mean {near}?" if near else f"; one of {', '.join(DATATYPE_BYTES)}"
            raise ValueError(f"{self.name}: unknown datatype {self.datatype!r}{meant}")
        shape = tuple(self.shape)
        if not shape or shape[0] != -1:
            raise ValueError(f"{self.name}: the first dimension is the rows and must be -1, not {shape[:1]}")
        if any(dim < -1 or dim == 0 for dim in shape):
            raise ValueError(f"{self.name}: dimensions are -1 or positive, not {list(shape)}")
        if self.pad is not None and (self.datatype == "BYTES" or -1 not in shape[1:]):
            raise ValueError(f"{self.name}: pad needs a numeric tensor with a variable dimension")
        object.__setattr__(self, "shape", shape)

    @property
    def declared(self) -> TensorShape:
        """The same for the rooms that know no model."""
        return TensorShape(self.name, self.datatype, tuple(self.shape), self.pad)


class Model:
    """A model as Forebay runs it. Subclass it, declare `inputs` and `outputs`, and write `load` and `forward`.


    `load(device)` runs once, in the process that runs the model; `load_prepare()` in its place in the processes that
    run `prepare` alone (`inference.prepare_workers`). `forward(**inputs)` gets a whole batch on that
    device under inference mode; BYTES inputs arrive as `list[bytes]` in row order. It returns one tensor, or a
    dict by output name; the first dimension of each is the rows. `prepare(**inputs)`, if there is one, turns one
    request's inputs into the tensors that `prepared` declares; what it raises is that request's error alone.
    `example()`, if there is one, gives one request's inputs to warm up with. Keyword arguments of the class
    come from `model.options`.

    A model that runs in steps has `begin` and `step` in place of `forward`. `begin(**inputs)` gets the rows that join
    and returns a list with one state of any kind per row. `step(states)` gets the states of all rows that run and
    returns a list with one entry per row: None while it goes on; once it has ended its outputs, a tensor without the
    row dimension, or a dict by output name. After a call that failed rows may begin again.
    """

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    prepared: Sequence[TensorSpec] = ()

    def load(self, device: torch.device) -> None:
        """Build the network and move it to `device`."""

    def load_prepare(self) -> None:
        """Build what `prepare` needs, in a process that runs nothing else; unless overridden, all of it on the CPU."""
        import torch

        self.load(torch.device("cpu"))

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Run one batch."""
        raise NotImplementedError(f"{type(self).__name__} must define forward()")

    def begin(self, *args: Any, **inputs: Any) -> Sequence[Any]:
        """Begin rows; return a state of any kind for each."""
        raise NotImplementedError(f"{type(self).__name__} must define begin()")

    def step(self, states: list[Any]) -> Sequence[Any]:
        """Run one step of all rows; return None for each that goes on, its outputs for each that has ended."""
        raise NotImplementedError(f"{type(self).__name__} must define step()")

    def example(self) -> Mapping[str, Any] | None:
        """Return one request's inputs for the warm-up, or None for zeros (ones where zero is padding)."""
        return None


def runs_in_steps(model: Model) -> bool:
    """Whether a model has `begin` and `step` in place of `forward`."""
    return type(model).step is not Model.step
