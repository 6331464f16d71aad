"""What the loop and a replica tell each other: small structs in MessagePack. Tensors cross in staging slots instead.

Nothing is ever pickled: a replica reads only these types.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Spec(msgspec.Struct, array_like=True, frozen=True):
    """A declared tensor."""

    name: str
    datatype: str
    shape: list[int]
    pad: float | None = None


class Start(msgspec.Struct, array_like=True, tag="start"):
    """Loop to replica or preparer, once: what to load and where. `search` are folders to import the factory from.

    `takes_prepared` says that the model's `prepare` runs in preparers: a replica gets what it returned. `sizes` are the
    batch sizes, `buckets` the lengths of ragged dimensions that the model runs in; empty: any. `sharing` is how many
    replicas run in one process. `max_cost`, in `cost_unit`, bounds a batch of several requests.
    """

    model: str
    version: str
    factory: str | None
    path: str | None
    weights: str | None
    options: dict[str, Any]
    device: str
    precision: str
    threads: int | None
    max_batch_size: int
    slot_bytes: int
    input_bytes: int
    slots: int
    search: list[str]
    takes_prepared: bool = False
    compile: str = "none"
    sizes: list[int] = []
    buckets: list[int] = []
    memory_fraction: float | None = None
    self_check: bool = True
    sharing: int = 1
    max_cost: int | None = None
    cost_unit: str = "rows"


class Placed(msgspec.Struct, array_like=True):
    """A tensor in a slot: `offset` from the slot's start, its bytes, and its dimensions with the rows first."""

    offset: int
    size: int
    dims: list[int]


class Run(msgspec.Struct, array_like=True, tag="run"):
    """Loop to replica: run the batch in `slot`.

    `rows` has the rows of each request; empty: one each. `shapes` has the dimensions of every input of every request
    where the tensors of a batch lie one after the other instead of stacked (models with `prepare`); else it is empty.
    `bucket` is the batch's: see `caps`. `skipped` are requests that a later Skip named before the batch began.
    """

    number: int
    slot: int
    requests: int
    rows: list[int]
    inputs: list[Placed]
    shapes: list[list[list[int]]]
    bucket: int = 0
    skipped: list[int] = []


class Skip(msgspec.Struct, array_like=True, tag="skip"):
    """Loop to replica: requests of a batch that was sent before have been answered, by index; they need not run."""

    number: int
    requests: list[int]


class Part(msgspec.Struct, array_like=True):
    """Outputs of requests that ran together. `requests` are their indices in order; empty: all of the batch."""

    requests: list[int]
    outputs: list[Placed]


class Mistake(msgspec.Struct, array_like=True):
    """One request's error."""

    request: int
    code: str
    message: str


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """Replica to loop, once: loaded, checked and warm. `prepared` is what it takes where preparers run `prepare`.

    `curve` has (bucket, rows, seconds) of what the warm-up ran, `peaks` (bucket, rows, bytes) where the device can say;
    `difference` is the largest that the self-check found between a row's outputs, None where there was no check.
    """

    inputs: list[Spec]
    outputs: list[Spec]
    prepares: bool
    device: str
    load_seconds: float
    warm_up_seconds: float
    curve: list[tuple[int, int, float]]
    notes: list[str]
    prepared: list[Spec] = []
    peaks: list[tuple[int, int, int]] = []
    difference: float | None = None


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """Replica to loop, once: it cannot start, and why, for a person."""

    message: str


class Done(msgspec.Struct, array_like=True, tag="done"):
    """Replica to loop: a batch is finished. A later part replaces an earlier one, a mistake replaces both.

    `left` are requests whose outputs the slot had no room for, behind those of the others: they must run again.
    `unsound` is set where every request failed and the model fails its own warm-up example, too: it says how.
    `cap` is how many rows of this bucket may run together, 0 where no bound is known. `pieces` counts the executions
    that were planned as parts, of a request larger than a batch or of a batch above the cap; the others isolate.
    `recompiles` counts executions that ran uncompiled since the last batch.
    A preparer answers with it, too: its outputs are prepared tensors, one part per request. It alone sets `seconds`,
    what each request took, and `costs`, what `prepare` said of each; 0 where it said nothing.
    """

    number: int
    parts: list[Part]
    mistakes: list[Mistake]
    stage_seconds: float
    forward_seconds: float
    total_seconds: float
    executions: int
    memory: dict[str, int]
    left: list[int] = []
    seconds: list[float] = []
    costs: list[float] = []
    unsound: str = ""
    cap: int = 0
    pieces: int = 0
    recompiles: int = 0


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """Loop to replica: finish and exit."""


encode = msgspec.msgpack.Encoder().encode
decode_to_replica = msgspec.msgpack.Decoder(Start | Run | Skip | Stop).decode
decode_to_loop = msgspec.msgpack.Decoder(Ready | Failed | Done).decode
