"""The values that travel the corridor: a record as read, the request in it, the batch, the outcome.

They belong to no room, so this module imports the standard library alone. The values that exist once per
request are plain slotted dataclasses, not frozen ones: a frozen dataclass of eight fields takes 0.88 µs to
make and a plain one 0.19 µs, and a request of 256 bytes has about ten microseconds in all. Treat them as frozen.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

Headers = list[tuple[str, bytes | None]]
"""Kafka record headers in order; values are opaque bytes."""

TensorData = memoryview | bytes | list[bytes]
"""One input of one request: its row-major little-endian bytes, or the elements of a BYTES tensor."""


class Code(StrEnum):
    """The error codes of an error result; a consumer may match on them."""

    INVALID_PAYLOAD = "invalid_payload"
    INVALID_TENSOR = "invalid_tensor"
    TOO_LARGE = "too_large"
    UNSUPPORTED_TYPE = "unsupported_type"
    UNKNOWN_MODEL = "unknown_model"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    REPLY_NOT_ALLOWED = "reply_not_allowed"
    MODEL_ERROR = "model_error"
    NON_FINITE_OUTPUT = "non_finite_output"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    RESULT_TOO_LARGE = "result_too_large"
    POISONED = "poisoned"
    INTERNAL = "internal"


RETRIABLE = frozenset({Code.RESOURCE_EXHAUSTED, Code.INTERNAL, Code.DEADLINE_EXCEEDED})
"""Codes where the same request may succeed if it is sent again; the error result says so."""


class Reason(StrEnum):
    """Why a batch was cut; the sum over reasons equals the batches that ran."""

    FULL_ROWS = "full_rows"
    FULL_COST = "full_cost"
    FULL_BYTES = "full_bytes"
    ALLOWED_SIZE = "allowed_size"
    IDLE = "idle"
    LINGER_EXPIRED = "linger_expired"
    DEADLINE = "deadline"
    DRAIN = "drain"
    SPLIT = "split"
    ISOLATION = "isolation"
    STEP = "step"


class Encoding(StrEnum):
    """How a request travels; its result travels the same way."""

    JSON = "application/json"
    BINARY = "application/octet-stream"


class Partition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


@dataclass(slots=True)
class Record:
    """One record as read from an input topic. `epoch` counts the assignments of its partition to this worker."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int
    epoch: int = 0

    @property
    def source(self) -> str:
        """The position as `TOPIC/PARTITION/OFFSET`."""
        return f"{self.topic}/{self.partition}/{self.offset}"


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A declared input or output, as the loop knows it: no torch type in it. Dimension -1 varies; the first is rows."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    pad: float | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """What a ready model accepts and returns. `prepares` says that inputs are per request until `prepare` ran.

    `prepared` is what `prepare` gives, where it runs before batching; empty where it runs in the replica or not at all.
    `room` is set where rows join what runs in steps: the bytes that one request may have.
    """

    model: str
    version: str
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    prepares: bool = False
    prepared: tuple[TensorShape, ...] = ()
    room: int = 0

    @property
    def batched(self) -> tuple[TensorShape, ...]:
        """The tensors that are stacked and padded into a batch; none where `prepare` runs behind the batcher."""
        return self.prepared or (() if self.prepares else self.inputs)


def lane_of(model: str, specs: Sequence[TensorShape], shapes: Sequence[tuple[int, ...]]) -> Hashable:
    """Return the lane of a request: equal where shapes agree in every dimension that may not be padded."""
    dims = [
        tuple(
            -1 if spec.pad is not None and want == -1 else dim
            for dim, want in zip(shape[1:], spec.shape[1:], strict=True)
        )
        for spec, shape in zip(specs, shapes, strict=True)
    ]
    return (model, *dims)


class Reply(NamedTuple):
    """Where a request asked its result to go."""

    topic: str
    partition: int | None


@dataclass(slots=True)
class Request:
    """A decoded, valid request: tensors in the order of the model's inputs.

    `arrived` and `deadline` are seconds on the worker's monotonic clock. `lane` is equal for requests that may
    share a batch. `item_bytes` is the size of all tensors, unpadded. `wanted` are indices of the outputs asked
    for, None for all. `tenant` is whom fairness counts it to, None for its partition; `cost` is what `prepare` said.
    """

    record: Record
    id: str
    model: str
    rows: int
    tensors: Sequence[TensorData]
    shapes: Sequence[tuple[int, ...]]
    encoding: Encoding
    lane: Hashable
    item_bytes: int
    arrived: float = 0.0
    deadline: float | None = None
    priority: int = 0
    reply: Reply | None = None
    wanted: tuple[int, ...] | None = None
    echo: Headers = field(default_factory=list)
    attempts: int = 0
    tenant: bytes | None = None
    cost: float | None = None


@dataclass(slots=True)
class Batch:
    """Requests that run together. `number` is unique in this worker's life.

    `bucket` is the padded elements per row of the ragged inputs, 0 where nothing varies; `expected` is the predicted
    service time in seconds, 0 where nothing is known. `deadline` is the earliest of its requests'; `answered` are
    the `id()` of requests that were answered before it ran.
    """

    number: int
    model: str
    requests: list[Request]
    rows: int
    reason: Reason
    cut_at: float
    bucket: int = 0
    expected: float = 0.0
    deadline: float | None = None
    answered: set[int] = field(default_factory=set)

    @classmethod
    def canary(cls, number: int, model: str, now: float) -> Batch:
        """Return what stands for a canary among a replica's batches: nobody's requests."""
        return cls(number, model, [], 0, Reason.ISOLATION, now)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no result: a code for programs and a sentence for a person."""

    code: Code
    message: str

    @property
    def retriable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.code in RETRIABLE


@dataclass(frozen=True, slots=True)
class Output:
    """One output of requests that ran together: rows x `dims`, row-major little-endian, or a list of elements."""

    dims: tuple[int, ...]
    content: bytes | list[bytes]


@dataclass(slots=True)
class Outcome:
    """What leaves the worker for one request record: a result or an error, encoded and addressed.

    `pending` counts the acknowledgements still missing: one for the outcome, one more for a dead letter.
    """

    record: Record
    id: str
    topic: str
    partition: int | None
    value: bytes
    headers: Headers
    model: str
    arrived: float
    echo: Headers
    failure: Failure | None = None
    attempts: int = 0
    pending: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that one batch spent in each stage of its replica.

    `pieces` are executions that were planned as parts: of a request larger than a batch, of a batch above the cap;
    `cap` the rows that the device's memory was seen to hold, None where no bound is known; `recompiles` executions
    that ran uncompiled; `refused` those for which the device had no memory.
    """

    stage: float = 0.0
    forward: float = 0.0
    total: float = 0.0
    executions: int = 1
    pieces: int = 0
    cap: int | None = None
    recompiles: int = 0
    refused: int = 0
