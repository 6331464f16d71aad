"""The canary: one row as a request like any other, whose answer was written down at the start.

Runs in the replica, on its one thread, when the loop says that nothing else has for a while: through a staging slot, to
the device and back. A wrong answer is the only sign of a device that computes wrongly without an error. The row is the
model's example; without one it is of random numbers, since of zeros a broken device may well make the right ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forebay.errors import ModelError
from forebay.inference.agreement import difference, tolerance_of
from forebay.inference.declared import TORCH
from forebay.inference.messages import Checked, Done, Run, Start
from forebay.inference.model import Model, TensorSpec
from forebay.inference.rehearsal import raw_row, stage
from forebay.inference.runner import Runner
from forebay.inference.samples import first_row, invented_row, ragged_specs, with_lengths, zeros
from forebay.inference.slots import Slot
from forebay.inference.staging import join_elements, split_elements

_RUNS = 3
_LENIENCE = 10.0
"""Times the self-check's tolerance: a library may take another algorithm some day, and corruption is not subtle."""

_MOST_BYTES = 65_536
"""Of an answer that the loop keeps for the replicas after this one."""

VARIES = "the model answers its example differently each time: the canary sees errors and hangs, no wrong answers"
BLIND = (
    "the model answers random numbers as it does zeros, so the canary may not see a device that computes wrongly: let "
    "example() return a real row"
)


class Canary:
    """The example of one replica. `record` writes its answer down; until then, or where it varies, none is wrong."""

    def __init__(self, runner: Runner, model: Model, start: Start, tolerance: float) -> None:
        self._runner = runner
        self._start = start
        self._outputs = list(model.outputs)
        self._tolerance = _LENIENCE * max(tolerance, tolerance_of(model))
        given: Mapping[str, Any] | None = model.example()
        self._is_invented = given is None
        if given is None:  # whole numbers may index a table: the self-check has tried whether 1 is in it
            self._row = self._shaped(invented_row(runner.specs, whole=start.self_check))
        else:
            self._row = self._shaped(first_row(model, given) if start.takes_prepared else raw_row(runner.specs, given))
        self._known: list[Any] | None = None

    @property
    def answer(self) -> list[bytes]:
        """The answer of the start, by output; empty where there is none, or too much of it."""
        raw = [_packed(value) for value in self._known or []]
        return raw if sum(map(len, raw)) <= _MOST_BYTES else []

    def record(self) -> str:
        """Run the example a few times and write its answer down; return a note where that says nothing.

        Raises ModelError where replicas before this one knew another answer, and one of them computed wrongly.
        """
        zero = self._shaped({spec.name: zeros(spec) for spec in self._runner.specs})
        answers = self._answers()
        if answers is None and self._is_invented:
            self._row = zero  # what the warm-up ran; random numbers are none for this model
            answers = self._answers()
        if answers is None:
            return ""  # no room in a slot, or an output that was never finite: errors are all that can be seen
        if any(self._differs(answers[0], other) for other in answers[1:]):
            return VARIES
        self._known = answers[0]
        self._compare(self._start.known)
        return BLIND if self._is_invented and self._is_blind(zero) else ""

    def stage(self, job: Run) -> Run | None:
        """Write the example into the slot of `job`; return the batch to run, None where it has no room."""
        return self._staged(job, self._row)

    def judge(self, job: Run, done: Done) -> Checked:
        """Say what the example came to."""
        if done.mistakes:
            why = done.unsound or done.mistakes[0].message
            is_news = bool(done.unsound) or self._known is not None
            return Checked(job.number, failed=why if is_news else "", memory=done.memory)
        answer = self._read(job, done)
        if self._known is None or answer is None or not self._differs(self._known, answer):
            return Checked(job.number, memory=done.memory)
        return Checked(job.number, wrong="it answers its example otherwise than at its start", memory=done.memory)

    def _shaped(self, row: dict[str, Any]) -> dict[str, Any]:
        return row if self._runner.prepares else _in_bucket(self._runner.specs, row, self._start.buckets)

    def _staged(self, job: Run, row: Mapping[str, Any]) -> Run | None:
        staged = stage(self._runner, self._start, row, 1, job.slot)
        if staged is not None:
            staged.number, staged.check = job.number, True
        return staged

    def _answers(self) -> list[list[Any]] | None:
        """Run the row a few times; None where it had no answer."""
        found = [self._run_alone(self._row) for _ in range(_RUNS)]
        answers = [answer for answer in found if answer is not None]
        return answers if len(answers) == _RUNS else None

    def _is_blind(self, zero: Mapping[str, Any]) -> bool:
        """Whether zeros have the same answer: of most models what is computed depends on what is asked."""
        assert self._known is not None
        if all(_is_same(value, self._row[name]) for name, value in zero.items()):
            return any(isinstance(value, torch.Tensor) and not bool(value.any()) for value in zero.values())
        answer = self._run_alone(zero)
        return answer is not None and not self._differs(self._known, answer)

    def _compare(self, raw: Sequence[bytes]) -> None:
        if not raw:
            return
        assert self._known is not None
        expected = [_unpacked(spec, value) for spec, value in zip(self._outputs, raw, strict=True)]
        if self._differs(expected, [_flat(value) for value in self._known]):
            raise ModelError(
                "it answers the model's example otherwise than the replicas before it, of which one computed wrongly: "
                "the device is broken, or the model's files have changed (reload with SIGHUP, or start again)"
            )

    def _run_alone(self, row: Mapping[str, Any]) -> list[Any] | None:
        job = self._staged(Run(0, 0, 1, [], [], []), row)
        return None if job is None else self._read(job, self._runner.run(job))

    def _read(self, job: Run, done: Done) -> list[Any] | None:
        """Return a copy of the outputs in the slot."""
        if len(done.parts) != 1 or done.mistakes:
            return None
        slot = Slot(self._runner.memory, job.slot * self._start.slot_bytes, 0, self._start.slot_bytes)
        values = [slot.read(spec, place) for spec, place in zip(self._outputs, done.parts[0].outputs, strict=True)]
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]

    def _differs(self, one: list[Any], other: list[Any]) -> bool:
        shapes = [[list(value.shape) for value in values if isinstance(value, torch.Tensor)] for values in (one, other)]
        if shapes[0] != shapes[1]:
            return True
        return difference(self._outputs, one, other, self._tolerance) > self._tolerance


def _flat(value: Any) -> Any:
    return value.flatten() if isinstance(value, torch.Tensor) else value


def _packed(value: Any) -> bytes:
    return join_elements(value) if isinstance(value, list) else _flat(value).view(torch.uint8).numpy().tobytes()


def _unpacked(spec: TensorSpec, raw: bytes) -> Any:
    if spec.datatype == "BYTES":
        return split_elements(raw)
    dtype = TORCH[spec.datatype]
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)


def _is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def _in_bucket(specs: Sequence[TensorSpec], row: dict[str, Any], buckets: Sequence[int]) -> dict[str, Any]:
    """Return a row with the length that the batcher would pad it to: what was compiled, or captured, is that."""
    lengths = [
        row[spec.name].shape[axis]
        for spec in ragged_specs(specs)
        for axis, dim in enumerate(spec.shape)
        if axis and dim == -1
    ]
    length = next((bucket for bucket in buckets if bucket >= max(lengths, default=0)), None)
    return row if not lengths or length is None else with_lengths(specs, row, length)
