"""Small builders for the unit tests: signatures, records and requests with only what a test cares about named."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count
from typing import Any

import numpy as np
from hypothesis import settings

from forebay.records import Encoding, Headers, Record, Request, Signature, TensorData, TensorShape
from forebay.wire import Tensor, build_request

settings.register_profile("unit", max_examples=50, stateful_step_count=30, deadline=None, database=None)
settings.load_profile("unit")

VECTOR = TensorShape("x", "FP32", (-1, 4))
SCORES = TensorShape("y", "FP32", (-1, 2))
NOW, NOW_MS = 1_000.0, 1_700_000_000_000.0
_offsets = count()


def signature(
    inputs: Sequence[TensorShape] = (VECTOR,),
    outputs: Sequence[TensorShape] = (SCORES,),
    *,
    model: str = "model",
    version: str = "1",
    prepares: bool = False,
) -> Signature:
    """A model that takes four floats and gives two, unless said otherwise."""
    return Signature(model, version, tuple(inputs), tuple(outputs), prepares)


def record(
    value: bytes | None = b"{}",
    headers: Sequence[tuple[str, bytes | None]] = (),
    *,
    key: bytes | None = None,
    offset: int | None = None,
    partition: int = 0,
    timestamp_ms: int = int(NOW_MS),
    topic: str = "requests",
) -> Record:
    """A record of the topic `requests`; its offset is new unless it is given."""
    at = next(_offsets) if offset is None else offset
    return Record(topic, partition, at, key, value, list(headers), timestamp_ms)


def request(
    name: str = "r",
    *,
    rows: int = 1,
    lane: Hashable = "a",
    arrived: float = 0.0,
    priority: int = 5,
    deadline: float | None = None,
    shape: Sequence[int] = (1,),
    tensors: Sequence[TensorData] | None = None,
    shapes: Sequence[tuple[int, ...]] | None = None,
    encoding: Encoding = Encoding.BINARY,
    wanted: tuple[int, ...] | None = None,
    echo: Headers | None = None,
    partition: int = 0,
) -> Request:
    """A request with one FP32 input of `rows` x `shape`, unless its tensors are given."""
    content: Sequence[TensorData] = tensors or [bytes(4 * rows * int(np.prod(shape)))]
    size = sum(sum(map(len, t)) + 4 * len(t) if isinstance(t, list) else len(t) for t in content)
    return Request(
        record=record(partition=partition),
        id=name,
        model="model",
        rows=rows,
        tensors=content,
        shapes=shapes or [(rows, *shape)],
        encoding=encoding,
        lane=lane,
        item_bytes=size,
        arrived=arrived,
        priority=priority,
        deadline=deadline,
        wanted=wanted,
        echo=echo or [],
    )


def floats(*rows: Sequence[float]) -> Tensor:
    """An FP32 tensor of these rows."""
    return Tensor(np.array(rows, "<f4"), "FP32")


def vector(start: float = 0.0, rows: int = 1) -> Tensor:
    """`rows` rows for the input of `VECTOR`; each counts on from `start`."""
    return floats(*[[start + row + step for step in range(4)] for row in range(rows)])


def vector_request(start: float = 0.0, rows: int = 1, **options: Any) -> tuple[bytes, Headers]:
    """The value and the headers of a valid request for `signature()`."""
    return build_request({"x": vector(start, rows)}, **options)


def as_floats(raw: TensorData) -> list[float]:
    """The FP32 values of a decoded tensor."""
    assert not isinstance(raw, list)
    return [float(value) for value in np.frombuffer(raw, "<f4")]
