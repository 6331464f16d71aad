"""The canary: the model's example as a request like any other, whose answer was written down at the start.

Runs in the replica, on its one thread, when the loop says that nothing else has for a while: through a staging slot, to
the device and back. A wrong answer is the only sign of a device that computes wrongly without an error. Imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forebay.inference.agreement import difference, tolerance_of
from forebay.inference.messages import Checked, Done, Run, Start
from forebay.inference.model import Model, TensorSpec
from forebay.inference.rehearsal import raw_row, stage
from forebay.inference.runner import Runner
from forebay.inference.samples import first_row, ragged_specs, with_lengths
from forebay.inference.slots import Slot

_RUNS = 3
_LENIENCE = 10.0
"""Times the self-check's tolerance: a library may take another algorithm some day, and corruption is not subtle."""

VARIES = "the model answers its example differently each time: the canary sees errors and hangs, no wrong answers"


class Canary:
    """The example of one replica. `record` writes its answer down; until then, or where it varies, none is wrong."""

    def __init__(self, runner: Runner, model: Model, start: Start, tolerance: float) -> None:
        self._runner = runner
        self._start = start
        self._outputs = list(model.outputs)
        self._tolerance = _LENIENCE * max(tolerance, tolerance_of(model))
        given: Mapping[str, Any] | None = model.example()
        row = first_row(model, given) if start.takes_prepared else raw_row(runner.specs, given)
        self._row = row if runner.prepares else _in_bucket(runner.specs, row, start.buckets)
        self._known: list[Any] | None = None

    def record(self) -> str:
        """Run the example a few times and write its answer down; return a note where that says nothing."""
        answers = [self._run_alone() for _ in range(_RUNS)]
        first = answers[0]
        if first is None or any(other is None for other in answers):
            return ""  # no room in a slot, or an output that was never finite: errors are all that can be seen
        if any(self._differs(first, other) for other in answers[1:] if other is not None):
            return VARIES
        self._known = first
        return ""

    def stage(self, job: Run) -> Run | None:
        """Write the example into the slot of `job`; return the batch to run, None where it has no room."""
        staged = stage(self._runner, self._start, self._row, 1, job.slot)
        if staged is not None:
            staged.number, staged.check = job.number, True
        return staged

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

    def _run_alone(self) -> list[Any] | None:
        job = self.stage(Run(0, 0, 1, [], [], []))
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
