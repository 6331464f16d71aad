"""The self-check at the start: does a row get the same outputs alone, in a batch, padded, and from several threads?

A model whose rows influence each other, or that counts its padding in, would answer a request by who came along with
it; such a model is refused before the worker joins its group. Runs in the replica, on its own thread.

A batch's size changes last bits, and near a tie those decide a label, or which way a quantised number is rounded. Such
a row is told from a mixed one by what it gives among copies of itself: the same size, and no neighbour but itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import ModelError
from forebay.inference.agreement import difference, is_quantised, tolerance_of
from forebay.inference.devices import is_sticky, open_device
from forebay.inference.groups import Inputs, rows_of
from forebay.inference.launching import Launcher
from forebay.inference.loading import where
from forebay.inference.messages import Start
from forebay.inference.model import Model
from forebay.inference.runner import Runner
from forebay.inference.samples import (
    collated,
    distinct_rows,
    example_rows,
    first_row,
    halved,
    one_row,
    padded_to,
    ragged_specs,
    repeated,
)
from forebay.inference.state import changed, state_of

_ROWS = 4
_MORE_ROWS = 16
_THREADS = 4
_TURNS = 3
_ANY_BUCKET = 1 << 62
_OFF = "or set inference.self_check to false if that is meant"


@dataclass(slots=True)
class SelfCheck:
    """What was found. `difference` is the largest between a row's outputs, relative to the largest output.

    `compared` says whether there is one: nothing could be compared without rows, or with one row at a time.
    """

    difference: float = 0.0
    compared: bool = False
    notes: list[str] = field(default_factory=list)


def self_check(runner: Runner, model: Model, start: Start, tolerance: float) -> SelfCheck:
    """Compare the outputs of a few rows.

    Raises ModelError, with the mend, for a model that no batch may be made for. One that gives other outputs for the
    same batch is no such model: dropout may be meant. It is only noted.
    """
    found = SelfCheck()
    try:
        rows = _usable_rows(runner, model, min(_ROWS, runner.memory_caps.rows(_ANY_BUCKET)), found)
        if rows is not None:
            _compare(_Checker(runner, model, max(tolerance, tolerance_of(model)), found), rows, model, start)
    except ModelError:
        raise
    except Exception as error:
        if is_sticky(error):
            raise
        name = type(model).__name__
        raise ModelError(f"{name} failed its self-check: {where(error)}; mend forward(), {_OFF}") from error
    return found


def _compare(checker: _Checker, rows: list[Inputs], model: Model, start: Start) -> None:
    before = state_of(model)
    is_random = checker.is_random(rows)
    if start.sharing > 1 and (name := changed(before, state_of(model))):
        raise ModelError(
            f"{type(model).__name__} keeps state between its calls ({name} changes), so {start.sharing} threads "
            "cannot share it; set inference.executor to process, or inference.replicas to 1"
        )
    if is_random:
        return
    checker.compare_padded(rows, start)
    checker.compare_batch(rows)
    if start.sharing > 1:
        checker.compare_threads(rows, start)


def _usable_rows(runner: Runner, model: Model, count: int, found: SelfCheck) -> list[Inputs] | None:
    """Return rows that the model runs alone without an error."""
    specs = list(model.prepared or model.inputs)
    has_example = example_rows(model) is not None
    if not has_example and any(spec.datatype == "BYTES" for spec in specs):
        found.notes.append("no self-check: a model with BYTES inputs needs example() for it")
        return None
    rows = distinct_rows(model, count)
    try:
        for row in rows:
            runner.trial(row, 1)
    except Exception as error:
        if is_sticky(error):
            raise
        found.notes.append(
            f"the self-check repeats one row, since the model refused others ({where(error)}); let example() return "
            "several rows"
        )
        return [first_row(model)] * count
    return rows


class _Checker:
    """Compares outputs and keeps the largest difference."""

    def __init__(self, runner: Runner, model: Model, tolerance: float, found: SelfCheck) -> None:
        self._runner = runner
        self._model = model
        self._name = type(model).__name__
        self._specs = list(model.prepared or model.inputs)
        self._outputs = list(model.outputs)
        self._tolerance = tolerance
        self._found = found

    def _apart(self, one: list[Any], other: list[Any]) -> float:
        return difference(self._outputs, one, other, self._tolerance)

    def is_random(self, rows: list[Inputs]) -> bool:
        """Whether the same batch gives other outputs the second time."""
        batch = collated(self._specs, rows)
        first, again = (self._runner.trial(batch, len(rows)) for _ in range(2))
        worst = self._apart(first, again)
        self._found.compared = True
        self._found.difference = worst
        if worst <= self._tolerance:
            return False
        self._found.notes.append(
            f"not deterministic: the same batch gave outputs that differ by {worst:.2g}, so the self-check compared "
            "nothing else"
        )
        return True

    def compare_padded(self, rows: list[Inputs], start: Start) -> None:
        """Compare half a row alone with the same half and padding; where that fails, see whether it is the rule."""
        ragged = ragged_specs(self._specs)
        worst = self._padded_apart(rows[0], start) if ragged else None
        if worst is None:
            return
        if worst > self._tolerance:
            others = [self._padded_apart(row, start) for row in rows[1:]]
            found = [worst, *[one for one in others if one is not None]]
            if self._is_exception([one > self._tolerance for one in found], "padded"):
                return
        names = ", ".join(f"{spec.name} where it is {spec.pad:g}" for spec in ragged)
        self._judge(
            worst,
            "gives a row other outputs when it is padded",
            f"mask {names}, or declare no pad, so that only rows of one length share a batch",
        )

    def _padded_apart(self, row: Inputs, start: Start) -> float | None:
        """Compare a row with the same row and padding, no longer than the row was or the warm-up's were.

        None where the model refuses the length: it may have a largest one, and a position beyond its table takes a CUDA
        device down.
        """
        half = halved(self._specs, row)
        longest = {
            spec.name: [
                max([dim, 2, *start.buckets]) if want == -1 else dim
                for dim, want in zip(row[spec.name].shape[1:], list(spec.shape)[1:], strict=True)
            ]
            for spec in ragged_specs(self._specs)
        }
        try:
            alone = self._runner.trial(half, 1)
            padded = self._runner.trial(padded_to(self._specs, half, longest), 1)
        except Exception as error:
            if is_sticky(error):
                raise
            self._found.notes.append(f"no self-check of padding: the model refused another length ({where(error)})")
            return None
        return self._apart(alone, padded)

    def compare_batch(self, rows: list[Inputs]) -> None:
        """Compare every row alone with the same row beside the others."""
        if len(rows) < 2:
            return
        apart = self._alone_and_together(rows)
        odd = [index for index, one in enumerate(apart) if one > self._tolerance]
        if odd and self._are_ties(rows, odd):
            return
        self._judge(
            max(apart),
            f"gives a row other outputs in a batch of {len(rows)} than alone: its rows influence each other",
            "compute every row from itself alone (no mean or normalisation over dimension 0), or set "
            "batch.max_batch_size to 1",
        )

    def _alone_and_together(self, rows: list[Inputs]) -> list[float]:
        """Return how far each row alone is from the same row beside the others."""
        together = self._runner.trial(collated(self._specs, rows), len(rows))
        return [
            self._apart(self._runner.trial(row, 1), [rows_of(value, index, index + 1, len(rows)) for value in together])
            for index, row in enumerate(rows)
        ]

    def _are_ties(self, rows: list[Inputs], odd: list[int]) -> bool:
        """Whether rows differ for a batch's size alone, and few of them; where too few were asked, more are."""
        if len(odd) * 2 >= len(rows):
            most = min(_MORE_ROWS, self._runner.memory_caps.rows(_ANY_BUCKET))
            if most <= len(rows) or rows[0] is rows[1]:
                return False
            rows = distinct_rows(self._model, most)
            odd = [index for index, one in enumerate(self._alone_and_together(rows)) if one > self._tolerance]
        if not is_quantised(self._model) and any(self._is_influenced(rows, index) for index in odd):
            return False
        return self._is_exception([index in odd for index in range(len(rows))], "in a batch")

    def _is_influenced(self, rows: list[Inputs], index: int) -> bool:
        """Whether a row gives something else among the others than among copies of itself."""
        batch, count = collated(self._specs, rows), len(rows)
        among_others = self._runner.trial(batch, count)
        among_copies = self._runner.trial(repeated(one_row(batch, count, index), count), count)
        mine = [[rows_of(value, index, index + 1, count) for value in found] for found in (among_others, among_copies)]
        return self._apart(*mine) > self._tolerance

    def _is_exception(self, odd: list[bool], when: str) -> bool:
        """Whether fewer than half of the rows differ; that is noted, for it may matter to somebody."""
        if sum(odd) * 2 >= len(odd):
            return False
        self._found.notes.append(
            f"{sum(odd)} of {len(odd)} rows give another answer {when} than alone, as near a tie: rounding decides"
        )
        return True

    def compare_threads(self, rows: list[Inputs], start: Start) -> None:
        """Compare what several threads get for different batches at the same time with what one gets alone.

        Each has the device to itself, with streams of its own, as the replicas have: only the model is shared.
        """
        caps, forward = self._runner.memory_caps, self._runner.forward
        launchers = [Launcher(open_device(start.device), forward, self._outputs, caps) for _ in range(_THREADS)]
        batches = [collated(self._specs, rows[turn:] + rows[:turn]) for turn in range(len(rows))]
        expected = [self._runner.trial(batch, len(rows)) for batch in batches]
        differences, errors = _at_once(
            lambda number: max(
                self._apart(
                    expected[number % len(batches)], launchers[number].trial(batches[number % len(batches)], len(rows))
                )
                for _ in range(_TURNS)
            )
        )
        if errors:
            raise ModelError(
                f"{self._name} fails when {_THREADS} threads run it ({errors[0]}); set inference.executor to process"
            )
        self._judge(
            max(differences),
            f"gives other outputs when {_THREADS} threads run it: it keeps state between its calls",
            "set inference.executor to process",
        )

    def _judge(self, worst: float, what: str, mend: str) -> None:
        self._found.difference = max(self._found.difference, worst)
        if worst > self._tolerance:
            raise ModelError(
                f"{self._name} {what} (they differ by {worst:.2g} of the largest, {self._tolerance:g} is tolerated); "
                f"{mend}, {_OFF}"
            )


def _at_once(work: Callable[[int], float]) -> tuple[list[float], list[str]]:
    """Run `work` in several threads that begin together; return what they gave and what they raised."""
    barrier = threading.Barrier(_THREADS)
    given: list[float] = []
    raised: list[str] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            given.append(work(number))
        except Exception as error:
            raised.append(where(error))

    threads = [threading.Thread(target=run, args=(number,), name="forebay-self-check") for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return given, raised
