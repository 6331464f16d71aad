"""The pool: the replicas of every served model, as the loop sees them. Never blocks on a model; imports no torch.

A replica that dies, hangs or loses its device is replaced, and what it left behind runs again (`leftovers`). The
preparers of a worker are a pool, too, of another kind.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from forebay import failpoints
from forebay.errors import DeviceLostError, ModelError
from forebay.inference.leftovers import Leftovers
from forebay.inference.messages import Done, Failed, Ready
from forebay.inference.replicas import Finished, Replica, State, finished
from forebay.records import Batch, Request, Signature


@dataclass(frozen=True, slots=True)
class Limits:
    """What the pool tolerates; times are seconds."""

    execution_timeout: float
    start_timeout: float
    max_attempts: int
    max_restarts: int


@dataclass(slots=True)
class Notice:
    """Something for the log and the metrics: a replica got ready or died."""

    event: str
    model: str
    fields: dict[str, object] = field(default_factory=dict)
    ready: Ready | None = None


class Pool:
    """The replicas of a worker. The loop's thread owns it; `now` is the monotonic clock in seconds."""

    def __init__(
        self,
        replicas: Iterable[Replica],
        limits: Limits,
        numbers: Iterator[int] | None = None,
        *,
        kind: str = "replica",
        poller: select.poll | None = None,
    ) -> None:
        self.kind = kind
        self._replicas = list(replicas)
        self._limits = limits
        self._leftovers = Leftovers(kind, limits.max_attempts, numbers or count(1))
        self.poller = poller or select.poll()  # two pools that share one wake the loop both
        self._stillborn = 0
        self.notices: deque[Notice] = deque()
        self.restarts = 0
        self.signatures: dict[str, Signature] = {}
        self.curves: dict[str, list[tuple[int, int, float]]] = {}

    def launch(self, now: float) -> None:
        """Start every replica; `collect` brings them up."""
        for replica in self._replicas:
            self._launch(replica, now)

    @property
    def ready(self) -> bool:
        """Whether every replica has loaded and warmed up."""
        return all(replica.state is State.READY for replica in self._replicas)

    def ready_count(self, model: str | None = None) -> int:
        """Return how many replicas (of a model) can take batches."""
        return sum(replica.state is State.READY and model in (None, replica.model) for replica in self._replicas)

    @property
    def in_flight(self) -> int:
        """Requests that were submitted and have not come back."""
        return sum(len(batch.requests) for batch in self._running()) + self._leftovers.requests

    def free_at(self, model: str) -> float | None:
        """Return the predicted time at which a replica of the model can begin another batch; None: none has room.

        0 while one is idle.
        """
        if self._is_recovering(model):
            return None
        return min((r.free_at for r in self._replicas if r.model == model and r.has_room), default=None)

    def _is_recovering(self, model: str) -> bool:
        """Whether work that a lost replica left behind goes first."""
        return bool(self._leftovers) and self._leftovers.concern(model)

    def submit(self, batch: Batch, now: float) -> None:
        """Stage a batch at the replica that has the least to do. Ask `free_at` first."""
        candidates = [replica for replica in self._replicas if replica.model == batch.model and replica.has_room]
        replica = min(candidates, key=lambda candidate: (candidate.free_at, len(candidate.running)))
        self._submit(replica, batch, now)
        failpoints.hit("after_submit")

    def collect(self, now: float, wait: float = 0.0) -> list[Finished]:
        """Return finished batches; waits up to `wait` seconds for the first. Replaces replicas that are gone.

        Raises ModelError where a model cannot start, DeviceLostError where replicas keep dying.
        """
        back: list[Finished] = []
        if (
            wait > 0
            and not self._leftovers.has_poisoned
            and not any(self._answers_at_once(replica) for replica in self._replicas)
        ):
            if wait < 0.001:  # poll counts in milliseconds, and rounds up
                time.sleep(wait)
            else:
                self.poller.poll(wait * 1000)
        for replica in self._replicas:
            if replica.state is State.DOWN:
                if now >= replica.relaunch_at:
                    self._launch(replica, now)
            else:
                self._listen(replica, now, back)
        if self._leftovers:
            self._run_again(now)
        return back + self._leftovers.poisoned()

    def _answers_at_once(self, replica: Replica) -> bool:
        if replica.state is State.DOWN or replica.transport.descriptor() is not None:
            return False
        return replica.state is State.STARTING or bool(replica.running)

    def drop(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        """Forget the suspects that `unwanted` picks; what a replica is running comes back all the same."""
        return self._leftovers.drop(unwanted)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests that have not come back and are still wanted; an answer that waits is not looked into."""
        for batch in self._running():
            yield from (one for one in batch.requests if id(one) not in batch.answered)
        yield from self._leftovers

    def _running(self) -> list[Batch]:
        return [batch for replica in self._replicas for batch, _ in replica.running]

    def forsake(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        """Do what `drop` does, and forget what replicas are running as well: what comes of it is dropped."""
        gone = self.drop(unwanted)
        for batch in self._running():
            picked = [one for one in batch.requests if unwanted(one) and id(one) not in batch.answered]
            batch.answered.update(map(id, picked))
            gone += picked
        return gone

    def expire(self, now: float) -> list[Request]:
        """Return the requests whose deadline passed before their batch ran: a long one may run in front of it."""

        def is_late(request: Request) -> bool:
            return request.deadline is not None and request.deadline <= now

        found = self.drop(is_late) if self._leftovers else []
        for replica in self._replicas:
            if any(batch.deadline is not None and batch.deadline <= now for batch, _ in list(replica.running)[1:]):
                found += replica.answer_early(is_late)
        return found

    def memory(self) -> dict[str, dict[str, int]]:
        """Return the bytes that each replica reported last, by kind."""
        return {replica.name: replica.memory for replica in self._replicas}

    def stop(self, *, at_once: bool = False) -> None:
        """End every replica and give the staging memory back; `at_once` where nothing that they do is wanted."""
        for replica in self._replicas:
            if at_once:
                replica.transport.kill()
            replica.stop()

    def _launch(self, replica: Replica, now: float) -> None:
        replica.launch(now)
        descriptor = replica.transport.descriptor()
        if descriptor is not None:
            self.poller.register(descriptor, select.POLLIN)

    def _submit(self, replica: Replica, batch: Batch, now: float) -> None:
        try:
            replica.submit(batch, now)
        except OSError as error:  # it never got this batch, so nothing is to be held against it
            replica.running.pop()
            self._leftovers.put_back(batch)
            self._lost(replica, now, str(error))

    def _listen(self, replica: Replica, now: float, back: list[Finished]) -> None:
        try:
            for message in replica.messages():
                if isinstance(message, Done):
                    self._stillborn = 0
                    back.append(finished(replica, message, now))
                    self._leftovers.run_alone(back[-1].left, now)  # the slot had no room for their outputs
                elif isinstance(message, Ready):
                    self._became_ready(replica, message)
                elif isinstance(message, Failed):
                    self._failed(replica, message.message, now)
                    return
        except (EOFError, OSError) as error:
            self._lost(replica, now, replica.transport.gone() or str(error) or "it hung up")
            return
        late = replica.late(now, self._limits.execution_timeout, self._limits.start_timeout)
        if late is not None:
            self._lost(replica, now, late)

    def _became_ready(self, replica: Replica, ready: Ready) -> None:
        signature = replica.became_ready(ready)
        self.signatures.setdefault(replica.model, signature)
        self.curves.setdefault(replica.model, ready.curve)
        fields: dict[str, object] = {
            self.kind: replica.name,
            "device": ready.device,
            "load_seconds": round(ready.load_seconds, 3),
            "warm_up_seconds": round(ready.warm_up_seconds, 3),
        }
        if ready.notes:
            fields["notes"] = ready.notes
        self.notices.append(Notice(f"{self.kind}_ready", replica.model, fields, ready))

    def _failed(self, replica: Replica, message: str, now: float) -> None:
        if replica.model not in self.signatures:
            raise ModelError(message)
        self._lost(replica, now, message)

    def _lost(self, replica: Replica, now: float, why: str) -> None:
        """Replace a replica; put its running batch under suspicion and its waiting one back."""
        descriptor = replica.transport.descriptor()
        if descriptor is not None:
            self.poller.unregister(descriptor)
        was_ready = replica.state is State.READY
        if not replica.transport.kill():
            raise DeviceLostError(f"{self.kind} {replica.name} is lost ({why}) and cannot be replaced in this process")
        why = f"{why}, {replica.transport.gone()}" if replica.transport.gone() not in (None, why) else why
        if not was_ready and replica.model not in self.signatures:
            raise ModelError(f"the process of model {replica.model} ended before the model was ready: {why}")
        self.restarts += 1
        self._stillborn += 1
        self.notices.append(Notice(f"{self.kind}_lost", replica.model, {self.kind: replica.name, "why": why}))
        if self._stillborn > self._limits.max_restarts:
            many = f"{self.kind}s died {self._stillborn} times"
            raise DeviceLostError(f"{many} without finishing a batch; the last: {why}")
        batches = [batch for batch, _ in replica.running]
        replica.down(now + min(2.0 ** (self._stillborn - 2), 30.0) if self._stillborn > 1 else now)
        self._leftovers.lost(batches, why)

    def _run_again(self, now: float) -> None:
        """Give idle replicas what lost ones left behind."""
        for replica in self._replicas:
            batch = self._leftovers.next(replica.model, now) if replica.is_idle else None
            if batch is not None:
                self._submit(replica, batch, now)
