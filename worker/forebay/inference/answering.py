"""What becomes of requests whose rows run in steps: taken out of their slots, answered into them, each on its own.

Runs on the replica's one thread, for `stepping`. It knows no batch and no step: who runs when is not its business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from forebay.inference.cohorts import Member, Row, Work
from forebay.inference.devices import is_sticky
from forebay.inference.example import DeviceLost
from forebay.inference.groups import rows_of
from forebay.inference.launching import failure_of
from forebay.inference.loading import where
from forebay.inference.messages import Done, Part, Run, Skip
from forebay.inference.runner import Runner, mistake
from forebay.inference.staging import join_elements
from forebay.inference.steps import Steps
from forebay.records import Code


class Desk:
    """The jobs that are not answered yet. `has_proof` says that the model worked for others since something failed."""

    def __init__(self, runner: Runner, steps: Steps, answer: Callable[[Done], None]) -> None:
        self._runner = runner
        self._steps = steps
        self._answer = answer
        self.works: dict[int, Work] = {}
        self.has_proof = False

    def open(self, job: Run) -> list[Row]:
        """Read a job's requests out of its slot, and prepare them where that is done here; return their rows."""
        flight, groups = self._runner.stage(job)
        flight.done.executions = 1
        work = self.works[job.number] = Work(flight)
        found: dict[int, Member] = {}
        for group in groups:
            begin = 0
            for request, count in zip(group.requests, group.rows, strict=True):
                member = found[request] = Member(work, request)
                for row in range(begin, begin + count):
                    inputs = {name: rows_of(value, row, row + 1, group.total) for name, value in group.inputs.items()}
                    member.rows.append(Row(member, inputs))
                begin += count
        work.members = [found[index] for index in sorted(found)]
        work.left = len(work.members)
        if not work.left:  # `prepare` refused all, or nobody is wanted any more
            self._finish(work)
        return [row for member in work.members for row in member.rows]

    def skip(self, message: Skip) -> None:
        """Forget requests that were answered already."""
        work = self.works.get(message.number)
        for member in work.members if work is not None else ():
            if member.index in message.requests and not member.has_ended:
                self.end(member)

    def write(self, member: Member) -> bool:
        """Write the outputs of a request whose rows have ended into its slot, or its error.

        Returns whether it has its result. One that has not, and has not ended either, is to run again, alone.
        """
        flight = member.work.flight
        since = flight.slot.position
        found: list[Any] = []
        failure = guarded(
            self._runner, lambda: found.extend(self._steps.join([row.outputs or [] for row in member.rows]))
        )
        if failure is None and not found[1]:
            if any(row.had_company for row in member.rows) and not member.ran_again:
                member.ran_again = True
                return False
            failure = Code.NON_FINITE_OUTPUT, "an output has NaN or infinity"
        if failure is None:
            failure = guarded(self._runner, lambda: self._place(member, found[0]))
        if failure is None:
            self.end(member)
            return True
        flight.slot.position = since
        if failure[0] is Code.RESULT_TOO_LARGE and flight.done.parts:
            flight.done.left.append(member.index)  # the others took the room: it runs again, without them
            self.end(member)
        else:
            self.fail(member, *failure)
        return False

    def _place(self, member: Member, outputs: list[Any]) -> None:
        flight = member.work.flight
        since, placed, copies = flight.slot.position, [], []
        for spec, value in zip(self._steps.outputs, outputs, strict=True):
            if spec.datatype == "BYTES":
                placed.append(flight.slot.write(join_elements(value), len(value), since))
            else:
                place, view = flight.slot.place(spec, list(value.shape), since)
                placed.append(place)
                copies.append((value, view))
        self._runner.device.download(copies).wait()
        flight.done.parts.append(Part([member.index], placed))

    def fail(self, member: Member, code: Code, message: str) -> None:
        """Give a request its error; where nothing speaks for the model, its example is asked, too."""
        flight = member.work.flight
        mistake(flight, member.index, code, message)
        if not self.has_proof and code is Code.MODEL_ERROR and len(flight.done.mistakes) >= flight.job.requests:
            self._runner.is_unsound(flight.done)
        self.end(member)

    def end(self, member: Member) -> None:
        """Let a request leave; answer its job when nobody of it is left."""
        member.has_ended = True
        for row in member.rows:
            row.state = row.outputs = None
        member.work.left -= 1
        if not member.work.left:
            self._finish(member.work)

    def _finish(self, work: Work) -> None:
        done = work.flight.done
        del self.works[done.number]
        done.total_seconds += done.stage_seconds
        done.memory = self._runner.figures(time.perf_counter())
        self._answer(done)


def guarded(runner: Runner, call: Callable[[], None]) -> tuple[Code, str] | None:
    """Do what may fail; return the failure as text, outside of its frames. Raises DeviceLost where none can succeed."""
    failure = None
    try:
        call()
    except Exception as error:
        if is_sticky(error):
            raise DeviceLost(where(error)) from error
        failure = failure_of(error)
    if failure is not None:
        runner.launcher.abandon()
    return failure
