"""What the first real batch costs: `python bench/first.py`, beside the batches that follow it.

A replica in a process of its own is started as the worker starts it: loaded, warmed up, checked, rehearsed. Then one
batch after the other goes through it, of numbers that it has not seen: a first one, and 200 more, whose median is the
steady time. That is done for every shape of a model (a single row, a full batch, each bucket), each shape being the
very first of a start once. Prints the first over the median for each, at most and in the middle; 1.5 is wanted. Times
are from the submission in the loop to the answer in the loop, Kafka left out. On a machine that others use, too, a
single batch says nothing by the clock: so the same is told by the time that both processes had a core (Linux). And
since caches grow cold while a replica waits, a batch after a pause is there to compare the first one with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from forebay.inference.assembly import build_pool
from forebay.inference.pool import Pool
from forebay.records import Batch, Encoding, Reason, Record, Request, TensorShape
from forebay.sections.inference import Inference, ModelSettings
from forebay.settings import Batch as BatchSettings
from forebay.settings import Delivery

WANTED = 1.5
COMPILERS = ("none", "inductor", "aoti")
_PAUSES, _PAUSE_SECONDS = 5, 0.6
_HERE = Path(__file__).resolve().parent
_random = np.random.default_rng()


@dataclass(frozen=True, slots=True)
class Shape:
    """What a batch is made of: `rows` requests of one row, of `length` where the model is ragged."""

    rows: int
    length: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the shapes of its batches; `lengths` are its buckets."""

    name: str
    factory: str
    shapes: tuple[Shape, ...]
    lengths: tuple[int, ...] = ()


CASES = (
    Case("perceptron", "models:Perceptron", (Shape(1), Shape(32))),
    Case("deep", "models:Busy", (Shape(1), Shape(32))),
    Case("ragged", "first_models:Texts", (Shape(1, 16), Shape(32, 16), Shape(1, 128), Shape(32, 128)), (16, 128)),
    Case("images", "executor_models:Pixels", (Shape(1), Shape(8))),
)


@dataclass(frozen=True, slots=True)
class First:
    """The first batch of a shape after a start, and what followed. `is_very`: it was the first of all."""

    model: str
    compile: str
    rows: int
    length: int
    is_very: bool
    first_ms: float
    steady_ms: float
    p99_ms: float
    first_cpu_ms: float
    steady_cpu_ms: float
    paused_cpu_ms: float

    @property
    def ratio(self) -> float:
        """What the first takes, relative to the others."""
        return self.first_ms / self.steady_ms

    @property
    def paused_ratio(self) -> float:
        """What a batch after a pause takes, relative to those without one, in time on a core."""
        return self.paused_cpu_ms / self.steady_cpu_ms

    @property
    def cpu_ratio(self) -> float:
        """The same in time on a core."""
        return self.first_cpu_ms / self.steady_cpu_ms


class Replica:
    """One replica, as a worker has it, for batches that are made here."""

    def __init__(self, case: Case, compile: str, cache: Path) -> None:
        model = ModelSettings(name="m", factory=case.factory)
        inference = Inference(device="cpu", compile=compile, cache_dir=cache, canary_interval_ms=0)
        batch = BatchSettings(
            max_batch_size=max(shape.rows for shape in case.shapes), shape_buckets=tuple(case.lengths)
        )
        self._numbers = count(1)
        self._pool = build_pool([model], (inference, batch, Delivery()), [_HERE, _HERE.parent], self._numbers)

    def __enter__(self) -> Replica:
        self._pool.launch(time.monotonic())
        while not self._pool.ready:
            self._pool.collect(time.monotonic(), 0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.stop()

    def run(self, shape: Shape) -> tuple[float, float]:
        """Run a batch of new numbers and return what it took in milliseconds: by the clock, and on a core."""
        inputs = self._pool.signatures["m"].inputs
        requests = [_request(inputs, shape, index) for index in range(shape.rows)]
        bucket = 1 << (shape.length - 1).bit_length() if shape.length else 0
        batch = Batch(next(self._numbers), "m", requests, shape.rows, Reason.IDLE, 0.0, bucket)
        busy, began = self._busy_ms(), time.perf_counter()
        self._pool.submit(batch, time.monotonic())
        while not (back := _collected(self._pool)):
            pass
        took, busy = (time.perf_counter() - began) * 1e3, self._busy_ms() - busy
        assert not back[0].failures, back[0].failures[0]
        return took, busy

    def paused(self, shape: Shape) -> float:
        """Run a batch after a pause, and return how long it had a core."""
        time.sleep(_PAUSE_SECONDS)
        return self.run(shape)[1]

    def _busy_ms(self) -> float:
        """Return how long this process and the replica's threads have had a core."""
        [replica] = self._pool.of("m")
        tasks = Path(f"/proc/{replica.transport.pid}/task").glob("*/schedstat")
        return (time.process_time_ns() + sum(int(task.read_text().split()[0]) for task in tasks)) / 1e6


def _collected(pool: Pool) -> Sequence[object]:
    return pool.collect(time.monotonic(), 1.0)


def _request(inputs: Sequence[TensorShape], shape: Shape, number: int) -> Request:
    tensors, shapes = [], []
    for spec in inputs:
        dims = [1, *[shape.length if dim == -1 else dim for dim in spec.shape[1:]]]
        made = {
            "FP32": lambda dims: _random.random(dims, np.float32),
            "UINT8": lambda dims: _random.integers(0, 256, dims, np.uint8),
            "INT64": lambda dims: _random.integers(1, 1_000, dims),
        }[spec.datatype](dims)
        tensors.append(made.tobytes())
        shapes.append(tuple(dims))
    record = Record("requests", 0, number, None, b"", [], 0)
    size = sum(map(len, tensors))
    return Request(record, str(number), "m", 1, tensors, shapes, Encoding.BINARY, "m", size)


def measure(case: Case, compile: str, batches: int, cache: Path) -> list[First]:
    """Start a replica once for each shape, with that shape in front."""
    found = []
    for turn in range(len(case.shapes)):
        with Replica(case, compile, cache) as replica:
            for place, shape in enumerate(case.shapes[turn:] + case.shapes[:turn]):
                first = replica.run(shape)
                times, busy = (
                    sorted(column) for column in zip(*[replica.run(shape) for _ in range(batches)], strict=True)
                )
                told = (first[0], statistics.median(times), times[int(len(times) * 0.99)])
                on_core = (
                    first[1],
                    statistics.median(busy),
                    statistics.median(replica.paused(shape) for _ in range(_PAUSES)),
                )
                found.append(First(case.name, compile, shape.rows, shape.length, place == 0, *told, *on_core))
    return found


def show(found: Sequence[First]) -> None:
    """Print a line for every shape of every model and compilation."""
    table = Table(box=None, pad_edge=False)
    for name in ("model", "compile", "rows", "length"):
        table.add_column(name)
    for name in (
        "steady, ms",
        "p99, ms",
        "very first",
        "first of shape",
        "on a core",
        "on a core",
        "after a pause",
    ):
        table.add_column(name, justify="right")
    groups: dict[tuple[str, str, int, int], list[First]] = defaultdict(list)
    for one in found:
        groups[one.model, one.compile, one.rows, one.length].append(one)
    for (model, compile, rows, length), some in groups.items():
        told = [f"{statistics.median(getattr(one, name) for one in some):.3f}" for name in ("steady_ms", "p99_ms")]
        for ratio in ("ratio", "cpu_ratio"):
            for is_very in (True, False):
                ratios = [getattr(one, ratio) for one in some if one.is_very is is_very]
                told.append(f"{statistics.median(ratios):.2f} (≤ {max(ratios):.2f})" if ratios else "–")
        told.append(f"{statistics.median(one.paused_ratio for one in some):.2f}")
        table.add_row(model, compile, str(rows), str(length or "–"), *told)
    Console(width=130).print(table)


def main() -> None:
    """Measure every model in every compilation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES], default=[c.name for c in CASES])
    parser.add_argument("--compile", nargs="*", choices=COMPILERS, default=list(COMPILERS))
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="starts with each shape in front")
    parser.add_argument("--json", action="store_true", help="print every figure, as a line of JSON each")
    asked = parser.parse_args()
    found: list[First] = []
    with tempfile.TemporaryDirectory() as cache:
        for case in CASES:
            for compile in asked.compile if case.name in asked.only else ():
                for _ in range(asked.rounds):
                    found += measure(case, compile, asked.batches, Path(cache))
    if asked.json:
        for one in found:
            print(
                json.dumps(
                    {**asdict(one), "ratio": one.ratio, "cpu_ratio": one.cpu_ratio, "paused_ratio": one.paused_ratio}
                )
            )
    else:
        show(found)


if __name__ == "__main__":
    main()
