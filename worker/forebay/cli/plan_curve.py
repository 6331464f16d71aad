"""The service-time curve that `forebay plan` computes with: measured here, read from a file, or from a running worker.

Measuring starts a replica as the worker would, in a process of its own, and takes what its warm-up measured; no torch
comes into this process.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.batching.curve import Curve
from forebay.batching.padding import Axes
from forebay.batching.simulation import ServiceTime
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.cli.scrape import Reading
    from forebay.records import Signature
    from forebay.settings import ModelSettings, Settings

FORMAT = "forebay-curve-1"
METRIC = "forebay_service_time_seconds"
_Z95 = 1.645
_LEAST_SPREAD = 1.01
_NOTICE_SECONDS = 0.1

Point = tuple[int, int, float, float]
"""Bucket (padded elements per row, 0 where nothing varies), rows, median seconds, 95th percentile in seconds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A model's curve. `axes` are its ragged dimensions, as (input, dimension); `source` says where it is from."""

    model: str
    device: str
    points: Sequence[Point]
    axes: Axes = ()
    source: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def known(self) -> dict[int, list[tuple[int, float]]]:
        """The medians by bucket, as a Batcher's curve is seeded."""
        by_bucket: dict[int, list[tuple[int, float]]] = {}
        for bucket, rows, seconds, _ in sorted(self.points):
            by_bucket.setdefault(bucket, []).append((rows, seconds))
        return by_bucket

    @property
    def flat(self) -> list[tuple[int, float]]:
        """The medians for requests of unknown length: as long as the longest that was measured."""
        return self.known[0 if 0 in self.known else max(self.known)]

    @property
    def ragged(self) -> Axes | None:
        """The ragged dimensions; None where only the buckets tell that there are some."""
        return None if not self.axes and any(bucket for bucket, *_ in self.points) else self.axes

    @property
    def largest(self) -> int:
        """The most rows that were measured."""
        return max(rows for _, rows, _, _ in self.points)

    @property
    def spread(self) -> float:
        """The 95th percentile over the median, in the middle of all points."""
        ratios = sorted(high / middle for _, _, middle, high in self.points if middle > 0)
        return max(ratios[len(ratios) // 2], 1.0) if ratios else 1.0

    def noting(self, rows: int) -> Measured:
        """Return the same with a note where batches of `rows` are beyond what was measured."""
        if rows <= self.largest:
            return self
        return replace(self, notes=[*self.notes, f"beyond {self.largest:,} rows the curve goes on as a line"])

    def service(self, seed: int = 1) -> ServiceTime:
        """Return the time of an execution: the median, and where the 95th percentile is higher, scattered like it."""
        curve = Curve()
        for bucket, points in (self.known | {0: self.flat}).items():
            curve.seed(points, bucket)
        if self.spread < _LEAST_SPREAD:
            return curve.predict
        sigma, dice = math.log(self.spread) / _Z95, random.Random(seed)
        return lambda bucket, rows: curve.predict(bucket, rows) * math.exp(sigma * dice.gauss(0, 1))

    def as_document(self) -> dict[str, Any]:
        """Return what `--save-curve` writes and `--curve` reads."""
        return {
            "format": FORMAT,
            "model": self.model,
            "device": self.device,
            "axes": [list(axis) for axis in self.axes],
            "points": [
                {"bucket": bucket, "rows": rows, "p50_ms": round(middle * 1000, 6), "p95_ms": round(high * 1000, 6)}
                for bucket, rows, middle, high in sorted(self.points)
            ],
        }


def save(curve: Measured, path: Path) -> None:
    """Write a curve."""
    import orjson

    try:
        path.write_bytes(orjson.dumps(curve.as_document(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        raise UsageError(f"--save-curve {path}: {error.strerror}") from error


def read(path: Path) -> Measured:
    """Read a curve that `save` wrote."""
    import orjson

    try:
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--curve {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise UsageError(f"--curve {path} is no JSON ({error}); forebay plan --save-curve {path} writes one") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f'--curve {path} has no "format": "{FORMAT}"; forebay plan --save-curve {path} writes one')
    try:
        points = [_point(entry) for entry in document["points"]]
        axes = tuple((int(index), int(dimension)) for index, dimension in document.get("axes", []))
    except (KeyError, TypeError, ValueError) as error:
        told = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"--curve {path}: a point {told}; each has bucket, rows, p50_ms and p95_ms") from error
    if not points:
        raise UsageError(f"--curve {path} holds no point; forebay plan --save-curve {path} writes one")
    return Measured(str(document.get("model")), str(document.get("device")), points, axes, f"curve of {path}")


def _point(entry: dict[str, Any]) -> Point:
    if not isinstance(entry, dict):  # whatever the file holds
        raise ValueError(f"cannot be {entry!r}")
    bucket, rows, middle = int(entry.get("bucket", 0)), int(entry["rows"]), float(entry["p50_ms"]) / 1000
    high = float(entry["p95_ms"]) / 1000 if "p95_ms" in entry else middle
    if rows < 1 or bucket < 0 or not 0 < middle < math.inf or not high < math.inf:
        raise ValueError("must have at least one row and take more than no time")
    return bucket, rows, middle, max(high, middle)


def of_worker(url: str, model: str | None) -> Measured:
    """Read the curve of a running worker from its metrics."""
    from forebay.cli.scrape import scrape
    from forebay.cli.top import UnreachableError

    reading = scrape(url)
    if reading.error:
        raise UnreachableError(f"no worker answers: {url}: {reading.error}; give its ops.host:ops.port with --url")
    return from_reading(reading, model)


def from_reading(reading: Reading, model: str | None) -> Measured:
    """Take the curve out of a worker's metrics; `model` chooses one of several."""
    found: dict[str, dict[tuple[int, int], dict[str, float]]] = {}
    for labels, value in reading.samples.get(METRIC, {}).items():
        named = dict(labels)
        place = (int(named["bucket"]), int(named["rows"]))
        found.setdefault(named["model"], {}).setdefault(place, {})[named["quantile"]] = value
    if not found:
        raise UsageError(
            f"the worker at {reading.url} has no service times yet ({METRIC}); let it answer some requests first"
        )
    if model is None and len(found) > 1:
        raise UsageError(f"the worker at {reading.url} serves {', '.join(sorted(found))}; choose one with --model")
    name = model or next(iter(found))
    if name not in found:
        raise UsageError(f"the worker at {reading.url} serves {', '.join(sorted(found))}, not {name}")
    points = [
        (bucket, rows, values["0.5"], max(values.get("0.95", 0.0), values["0.5"]))
        for (bucket, rows), values in sorted(found[name].items())
        if values.get("0.5", 0.0) > 0
    ]
    return Measured(name, "unknown", points, source=f"curve of the worker at {reading.url}")


def measure(settings: Settings, model: ModelSettings, largest: int, search: Sequence[Path], *, quiet: bool) -> Measured:
    """Start a replica, let it warm up with batches of up to `largest` rows, and end it.

    Raises ModelError with what keeps it from being ready.
    """
    from rich.console import Console

    from forebay.inference.assembly import build_pool

    batch = settings.batch.model_copy(update={"max_batch_size": largest})
    inference = settings.inference.model_copy(update={"replicas": 1, "executor": "process"})
    pool = build_pool([model], (inference, batch, settings.delivery), search, count(1))
    console = Console(stderr=True)
    says = f"measuring {model.name}: a replica loads and runs batches of up to {largest} rows"
    try:
        with contextlib.nullcontext() if quiet or not console.is_terminal else console.status(says):
            pool.launch(time.monotonic())
            while not pool.ready:
                pool.collect(time.monotonic(), _NOTICE_SECONDS)
    finally:
        pool.stop()
    device = next((str(notice.fields["device"]) for notice in pool.notices if "device" in notice.fields), "unknown")
    return _measured(pool.signatures[model.name], pool.curves[model.name], device)


def _measured(signature: Signature, warm: Sequence[tuple[int, int, float]], device: str) -> Measured:
    from forebay.assembly import axes_of

    points = [(bucket, rows, seconds, seconds) for bucket, rows, seconds in warm]
    if signature.room:
        raise UsageError(
            f"forebay plan knows batches, and model {signature.model} runs in steps, which requests join one by one: "
            "try it with its own load"
        )
    axes = axes_of(signature)
    notes = []
    if signature.prepared:  # its buckets are of what `prepare` makes, which the records do not tell
        axes = ()
        notes.append(
            "what prepare() makes of a record is not known here: each is taken as the largest that was measured"
        )
    elif axes and len({bucket for bucket, *_ in points}) == 1:
        notes.append(
            "one length only was measured; set batch.shape_buckets to measure several, or take the curve of a running "
            "worker (--url)"
        )
    return Measured(signature.model, device, points, axes, f"measured here on {device}", notes)
