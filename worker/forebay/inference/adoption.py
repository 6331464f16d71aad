"""Adoption: load a model, convert it to what `inference.precision` says, and measure what that does to its outputs.

Runs in the replica's thread, before the warm-up. `auto` tries every precision of the device and takes the fastest
within `inference.max_deviation`; the replicas of a worker agree through a file, for with two precisions an answer would
depend on who gave it. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from forebay.errors import ForebayError, ModelError
from forebay.inference import cache
from forebay.inference.devices import Device, is_sticky
from forebay.inference.golden import Golden, deviation, golden, run
from forebay.inference.loading import convert_as, load_plain, load_shared, where
from forebay.inference.messages import Start, Tried, encode
from forebay.inference.model import Model
from forebay.inference.precision import check, dtype_of, refusal, set_matmul
from forebay.inference.trials import try_out
from forebay.inference.verdicts import CANDIDATES, DEFAULT_MOST, judge

AUTO = "auto"
_KEPT_SECONDS = 30 * 86_400
_adopted: dict[bytes, Adoption] = {}


@dataclass(frozen=True, slots=True)
class Adoption:
    """What was adopted: the precision, how far its golden outputs are from fp32, and what else was tried."""

    precision: str
    deviation: float | None = None
    tried: list[Tried] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def adopt(start: Start, device: Device) -> tuple[Model, Adoption]:
    """Return the loaded, converted model and what it computes in. Raises ConfigError or ModelError with the mend."""
    if start.precision == AUTO:
        choice = _agreed(start, device)
        model, adopted = adopt(_as(start, choice.precision), device)
        return model, Adoption(
            choice.precision, adopted.deviation, choice.tried, list(dict.fromkeys([*choice.notes, *adopted.notes]))
        )
    check(start.precision, device.device)
    model = load_plain(start, device.device)
    device.settle()
    if start.precision == "fp32":
        return model, Adoption("fp32")
    known, notes = _golden(model, device, start)
    convert_as(model, start)
    if known is None:
        return model, Adoption(start.precision, None, [], notes)
    found = _deviation(model, device, start, known)
    if start.max_deviation is not None and found > start.max_deviation:
        raise ModelError(
            f"inference.precision {start.precision}: golden outputs deviate by {found:.2g} from fp32, and "
            f"inference.max_deviation is {start.max_deviation:g}; take a more exact one; forebay optimize "
            "compares them"
        )
    return model, Adoption(start.precision, found, [], [*known.notes, *notes])


def adopt_shared(start: Start, device: Device) -> tuple[Model, Adoption]:
    """Do the same, or return what another replica of this process has adopted for the same settings."""
    key = encode(start)

    def make() -> Model:
        model, _adopted[key] = adopt(start, device)
        return model

    model = load_shared(start, make)
    return model, _adopted[key]


def candidates(start: Start, device: Device) -> Iterator[tuple[Model | None, Start, Golden | None, Tried]]:
    """Yield each precision: the model, converted and not yet run, or a verdict on why there is none."""
    for precision in CANDIDATES:
        mine = _as(start, precision)
        tried = Tried(precision, start.compile)
        why = refusal(precision, device.device)
        if why is not None:
            tried.verdict = f"not here: {why.removeprefix(f'inference.precision {precision} ')}"
            yield None, mine, None, tried
            continue
        model = load_plain(mine, device.device)
        device.settle()
        known = golden(model, device.device, start.max_batch_size)
        try:
            convert_as(model, mine)
        except ForebayError as error:
            tried.verdict = f"not here: {str(error).removeprefix(f'inference.precision {precision} ')}"
            yield None, mine, None, tried
            continue
        yield model, mine, known, tried


def _agreed(start: Start, device: Device) -> Adoption:
    """Choose, or take over what another replica of the same worker has chosen."""
    if not start.session:
        return _choose(start, device)
    place = cache.folder(start.cache_dir, "choices")
    path = place / f"{start.session}.msgpack"
    with cache.locked(path):
        if path.exists():
            found = msgspec.msgpack.decode(path.read_bytes(), type=Adoption)  # JSON has no infinity
            return Adoption(found.precision, None, found.tried, [*found.notes, "chosen by another replica, or before"])
        cache.forget_older(place, _KEPT_SECONDS)
        chosen = _choose(start, device)
        cache.put(path, msgspec.msgpack.encode(chosen))
        return chosen


def _choose(start: Start, device: Device) -> Adoption:
    tried: list[Tried] = []
    notes: list[str] = []
    try:
        for model, mine, known, one in candidates(start, device):
            if model is not None and known is not None:
                one = try_out(model, device, mine, known)
                notes = known.notes
            tried.append(one)
    except Exception as error:
        if isinstance(error, ForebayError) or is_sticky(error):
            raise
        raise ModelError(f"inference.precision auto: the model failed in fp32: {where(error)}") from error
    finally:
        set_matmul("fp32")
    most = DEFAULT_MOST if start.max_deviation is None else start.max_deviation
    chosen = judge(tried, most)
    return Adoption(chosen.precision if chosen else "fp32", None, tried, notes)


def _golden(model: Model, device: Device, start: Start) -> tuple[Golden | None, list[str]]:
    """Return the golden outputs in fp32; none, and why, for a model that fails: the warm-up says how to mend that."""
    try:
        return golden(model, device.device, start.max_batch_size), []
    except Exception as error:
        if is_sticky(error):
            raise
        return None, [f"no deviation from fp32 is known: the model failed in it ({where(error)})"]


def _deviation(model: Model, device: Device, start: Start, known: Golden) -> float:
    try:
        outputs = run(model, known.inputs, known.rows, device.device, dtype_of(start.precision))
    except Exception as error:
        if is_sticky(error):
            raise
        raise ModelError(
            f"inference.precision {start.precision}: the model fails in it, and not in fp32: {where(error)}"
        ) from error
    return deviation(model.outputs, known.outputs, outputs)


def _as(start: Start, precision: str) -> Start:
    return msgspec.structs.replace(start, precision=precision)
