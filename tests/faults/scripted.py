"""A replica without a process, a model or torch: what `tests.models:Double` answers, when and how a script says.

It stands where the inline transport would, and talks as a process does: messages over a wire, tensors in the staging
slots. A manual clock says when a batch is done. A script, drawn from a seed, says which batch kills the replica, hangs,
runs out of memory or finds the slot too small; rows of `Magic` misbehave as the real model's do.
"""

from __future__ import annotations

import mmap
import random
import struct
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.inference.messages import (
    Checked,
    Done,
    Measure,
    Measured,
    Mistake,
    Part,
    Placed,
    Ready,
    Run,
    Skip,
    Spec,
    Start,
    encode,
)
from forebay.inference.messages import decode_to_replica as decode
from forebay.testing import ManualClock
from tests.magic import Magic

WIDTH = 4
"""Numbers in a row."""

_DIES = {Magic.SEGFAULT: "it was ended by signal 11", Magic.EXIT: "it exited with code 9"}
_FAILS = {
    Magic.RAISE: ("model_error", "this row is poison"),
    Magic.NAN: ("non_finite_output", "the output has NaN"),
    Magic.HOG: ("resource_exhausted", "it does not fit into the memory"),
}


class Script:
    """What befalls the replicas of a run. They die or hang by chance at most `deaths` times in all: with as many as
    `delivery.max_attempts`, a killer's among them, an innocent request might be taken for the one that kills.
    """

    def __init__(self, dice: random.Random, deaths: int) -> None:
        self._dice = dice
        self._deaths = deaths
        self.seen: Counter[str] = Counter()

    def seconds(self) -> float:
        """Return how long the next batch takes."""
        return self._dice.choice((0.0005, 0.002, 0.002, 0.01, 0.05))

    def fate(self) -> str:
        """Return what becomes of the next batch."""
        fate = self._fate()
        self.seen[fate] += 1
        return fate

    def _fate(self) -> str:
        chance = self._dice.random()
        if chance < 0.06 and self._deaths:
            self._deaths -= 1
            return self._dice.choice(("dies before", "dies behind", "hangs"))
        if chance < 0.12:
            return self._dice.choice(("runs out of memory", "runs out of slot", "is broken"))
        return "goes well"

    def starts(self) -> bool:
        """Say whether a replica that is started again gets ready."""
        if self._deaths and self._dice.random() < 0.1:
            self._deaths -= 1
            self.seen["does not start again"] += 1
            return False
        return True


class ScriptedPoller:
    """In place of `select.poll`: waiting moves the clock."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def register(self, descriptor: int, events: int) -> None:
        """Do nothing."""

    def unregister(self, descriptor: int) -> None:
        """Do nothing."""

    def poll(self, milliseconds: float) -> None:
        """Wait."""
        self._clock.advance(milliseconds / 1000)


@dataclass(slots=True)
class _Begun:
    """A batch that was sent; the one in front is running."""

    run: Run
    due: float
    fate: str
    skipped: set[int] = field(default_factory=set)


class ScriptedReplica:
    """The loop's end of such a replica: the methods of `forebay.inference.transports.Transport`."""

    def __init__(self, memory: mmap.mmap, clock: ManualClock, script: Script) -> None:
        self._memory = memory
        self._clock = clock
        self._script = script
        self._launched = 0
        self._batches: deque[_Begun] = deque()
        self._answers: deque[bytes] = deque()
        self._free_at = 0.0
        self._why: str | None = None

    def launch(self) -> None:
        """Begin a life."""
        self._launched += 1
        self._batches.clear()
        self._answers.clear()
        self._why = None
        self._free_at = 0.0

    def send(self, message: bytes) -> None:
        """Take a message; a dead one refuses it, as a closed socket does."""
        if self._why is not None:
            raise BrokenPipeError(self._why)
        job = decode(message)
        if isinstance(job, Start):
            self._start(job)
        elif isinstance(job, Run):
            self._free_at = max(self._free_at, self._clock.now) + self._script.seconds()
            self._batches.append(_Begun(job, self._free_at, self._script.fate()))
        elif isinstance(job, Measure):
            self._answers.append(encode(Measured(0, 0.0)))
        elif isinstance(job, Skip):
            for begun in list(self._batches)[1:]:
                if begun.run.number == job.number:
                    begun.skipped.update(job.requests)

    def receive(self) -> bytes | None:
        """Return what is finished by now. Raises EOFError where it has died."""
        if not self._answers and self._why is None and self._batches and self._batches[0].due <= self._clock.now:
            self._finish(self._batches[0])
        if self._answers:
            return self._answers.popleft()
        if self._why is not None:
            raise EOFError(self._why)
        return None

    def descriptor(self) -> int:
        """Return a number for the poller, which is as false as this is."""
        return id(self)

    def gone(self) -> str | None:
        """Say how it ended."""
        return self._why

    def kill(self) -> bool:
        """End it."""
        self._why = self._why or "it was ended by signal 9"
        return True

    def stop(self) -> None:
        """End it, too."""
        self.kill()

    def _start(self, start: Start) -> None:
        self._started = start
        if self._launched > 1 and not self._script.starts():
            self._why = "it exited with code 1"
            return
        x, y = (Spec(name, "FP32", [-1, WIDTH]) for name in "xy")
        self._answers.append(encode(Ready([x], [y], False, "cpu", 0.0, 0.0, [], [])))

    def _finish(self, begun: _Begun) -> None:
        if begun.run.check:
            self._batches.popleft()
            self._answers.append(encode(Checked(begun.run.number)))
            return
        rows = self._read(begun.run)
        lowest = {int(row[0]) for index, ours in enumerate(rows) if index not in begun.skipped for row in ours}
        if begun.fate == "hangs" or Magic.HANG in lowest:
            begun.due = float("inf")
            return
        killer = next((why for magic, why in _DIES.items() if magic in lowest), None)
        if killer is None and begun.fate == "dies before":
            killer = "it was ended by signal 6"
        if killer is not None:
            self._why = killer
            return
        self._batches.popleft()
        done = self._done(begun, rows)
        if begun.fate == "dies behind":
            self._why = "it was ended by signal 15"
        else:
            self._answers.append(encode(done))

    def _read(self, run: Run) -> list[list[tuple[float, ...]]]:
        """Return the rows of each request."""
        [place] = run.inputs
        start = run.slot * self._started.slot_bytes + place.offset
        flat = list(struct.iter_unpack(f"<{WIDTH}f", self._memory[start : start + place.size]))
        found, begin = [], 0
        for count in run.rows or [1] * run.requests:
            found.append(flat[begin : begin + count])
            begin += count
        return found

    def _done(self, begun: _Begun, rows: list[list[tuple[float, ...]]]) -> Done:
        run = begun.run
        done = Done(run.number, [], [], 0.0, 0.001, 0.001, 1, {"resident": 1})
        wanted = [index for index in range(run.requests) if index not in begun.skipped]
        if begun.fate == "is broken":
            done.mistakes = [Mistake(index, "model_error", "no weights") for index in wanted]
            done.unsound = "no weights"
            return done
        fine = []
        for index in wanted:
            magic = min(int(row[0]) for row in rows[index])
            if magic in _FAILS:
                done.mistakes.append(Mistake(index, *_FAILS[Magic(magic)]))
            else:
                fine.append(index)
        if begun.fate == "runs out of slot" and len(fine) > 1:
            done.left = [fine.pop()]
        groups = [fine]
        if begun.fate == "runs out of memory" and len(fine) > 1:
            half = len(fine) // 2
            groups, done.executions, done.pieces, done.cap = [fine[:half], fine[half:]], 3, 2, half
        self._write(run, done, groups, rows)
        return done

    def _write(self, run: Run, done: Done, groups: Sequence[list[int]], rows: list[list[tuple[float, ...]]]) -> None:
        """Write the answers into the slot, a part for each group."""
        position = self._started.input_bytes
        for group in filter(None, groups):
            numbers = [2 * number + 1 for index in group for row in rows[index] for number in row]
            raw = struct.pack(f"<{len(numbers)}f", *numbers)
            start = run.slot * self._started.slot_bytes + position
            self._memory[start : start + len(raw)] = raw
            done.parts.append(Part(group, [Placed(position, len(raw), [len(numbers) // WIDTH, WIDTH])]))
            position += len(raw)
