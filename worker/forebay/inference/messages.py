"""What the loop and a replica tell each other: small structs in MessagePack. Tensors cross in staging slots instead.

Nothing is ever pickled: a replica reads only these types.
"""

from __future__ import annotations

from typing import Any

import msgspec

from forebay.inference.model import MOST_STEPS


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
    replicas run in one process. `max_cost`, in `cost_unit`, bounds a batch of several requests. `generation` counts the
    reloads of the model: those of one share no weights with those of another. Replicas with the same `session` agree on
    what `precision: auto` means; without one each decides alone. `cpu_threads` are what a CPU's replica takes where
    `threads` says nothing; 0: torch's own number. `known` is the canary's answer at an earlier start, once a replica
    has computed wrongly: the next ones must agree. `continuous` lets rows of a model that runs in steps join what
    runs; a row may take `max_steps`.
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
    generation: int = 0
    cpu_threads: int = 0
    max_deviation: float | None = None
    cache_dir: str | None = None
    session: str = ""
    known: list[bytes] = []
    continuous: bool = False
    max_steps: int = MOST_STEPS


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
    `check` asks for the canary in place of a batch: the replica itself writes the inputs, and answers with Checked.
    """

    number: int
    slot: int
    requests: int
    rows: list[int]
    inputs: list[Placed]
    shapes: list[list[list[int]]]
    bucket: int = 0
    skipped: list[int] = []
    check: bool = False


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


class Tried(msgspec.Struct, array_like=True):
    """What a candidate of `precision: auto`, or of `forebay optimize`, gave.

    Seconds are the best of a full batch and of one row. `deviation` is of its golden outputs from those in fp32;
    `verdict` says why it was adopted or not.
    """

    precision: str
    compile: str
    full_rows: int = 0
    full_seconds: float = 0.0
    one_seconds: float = 0.0
    deviation: float = 0.0
    verdict: str = ""
    sparsity: str = ""


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """Replica to loop, once: loaded, checked and warm. `prepared` is what it takes where preparers run `prepare`.

    `curve` has (bucket, rows, seconds) of what the warm-up ran, `peaks` (bucket, rows, bytes) where the device can say;
    `difference` is the largest that the self-check found between a row's outputs, None where there was no check.
    `deviation` is that of the adopted precision from fp32, None where nothing was measured; `tried` what `auto` tried.
    `answer` is the canary's, by output; empty where there is none, or too much of it. `slots` is set where rows join
    what runs: the staging memory is divided into so many, each for one request.
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
    precision: str = ""
    compile: str = ""
    deviation: float | None = None
    tried: list[Tried] = []
    threads: int = 0
    answer: list[bytes] = []
    slots: int = 0


class Stage(msgspec.Struct, array_like=True, tag="stage"):
    """Replica to loop, while it starts: what it begins to do, for the log."""

    name: str
    fields: dict[str, str | int | float]


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """Replica to loop, once: it cannot start, and why, for a person."""

    message: str


class Done(msgspec.Struct, array_like=True, tag="done"):
    """Replica to loop: a batch is finished. A later part replaces an earlier one, a mistake replaces both.

    `left` are requests whose outputs the slot had no room for, behind those of the others: they must run again.
    `unsound` is set where every request failed and the model fails its own warm-up example, too: it says how.
    `cap` is how many rows of this bucket may run together, 0 where no bound is known. `pieces` counts the executions
    that were planned as parts, of a request larger than a batch or of a batch above the cap; the others isolate.
    `recompiles` counts executions that ran uncompiled since the last batch, `refused` those that ran out of memory.
    A preparer answers with it, too: its outputs are prepared tensors, one part per request. It alone sets `seconds`,
    what each request took, and `costs`, what `prepare` said of each; 0 where it said nothing. `rows` are those of the
    last step, of a model that runs in steps.
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
    refused: int = 0
    rows: int = 0


class Stepped(msgspec.Struct, array_like=True, tag="stepped"):
    """Replica to loop, every 0.1 s while rows run in steps: what was done since, and how many rows run now.

    `row_steps` counts a step once for each of its rows, `restarted` the rows that had to begin again.
    """

    rows: int
    steps: int
    row_steps: int
    seconds: float
    restarted: int


class Checked(msgspec.Struct, array_like=True, tag="checked"):
    """Replica to loop: the canary has run. `wrong` says how its answer is not what it was, `failed` why it has none."""

    number: int
    wrong: str = ""
    failed: str = ""
    memory: dict[str, int] = {}


class Measure(msgspec.Struct, array_like=True, tag="measure"):
    """Loop to replica, before the first batch: run the rehearsal's batches for this long, and say how many rows."""

    for_seconds: float


class Measured(msgspec.Struct, array_like=True, tag="measured"):
    """Replica to loop: the rows that ran, and in how many seconds; 0 where there was nothing to run."""

    rows: int
    seconds: float


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """Loop to replica: finish and exit."""


encode = msgspec.msgpack.Encoder().encode
decode_to_replica = msgspec.msgpack.Decoder(Start | Run | Skip | Measure | Stop).decode
decode_to_loop = msgspec.msgpack.Decoder(Ready | Failed | Done | Checked | Measured | Stage | Stepped).decode
