"""The pool: the replicas of every served model, as the loop sees them. Never blocks on a model; imports no torch.

A replica that dies, hangs or loses its device is replaced. The batch that it was running is suspect: its requests run
again one by one, and one that has brought a replica down `max_attempts` times is poisoned. The batch that was only
waiting in a slot runs again as it was.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from forebay.errors import DeviceLostError, ModelError
from forebay.inference.messages import Done, Failed, Ready
from forebay.inference.replicas import Finished, Replica, State, finished
from forebay.records import Batch, Code, Failure, Reason, Request, Signature


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


class Pool:
    """The replicas of a worker. The loop's thread owns it; `now` is the monotonic clock in seconds."""

    def __init__(self, replicas: Iterable[Replica], limits: Limits, numbers: Iterator[int] | None = None) -> None:
        self._replicas = list(replicas)
        self._limits = limits
        self._numbers = numbers or count(1)
        self._suspects: deque[Request] = deque()
        self._returned: deque[Batch] = deque()
        self._poisoned: list[Finished] = []
        self._poller = select.poll()
        self._stillborn = 0
        self.notices: deque[Notice] = deque()
        self.restarts = 0
        self.signatures: dict[str, Signature] = {}

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
        running = sum(len(batch.requests) for replica in self._replicas for batch, _ in replica.running)
        waiting = [*self._returned, *(finished.batch for finished in self._poisoned)]
        return running + len(self._suspects) + sum(len(batch.requests) for batch in waiting)

    def is_idle(self, model: str) -> bool:
        """Whether a replica of the model has nothing to do."""
        return not self._is_recovering(model) and any(r.is_idle for r in self._replicas if r.model == model)

    def has_room(self, model: str) -> bool:
        """Whether a replica of the model can take a batch, now or behind the one that it runs."""
        return not self._is_recovering(model) and any(r.has_room for r in self._replicas if r.model == model)

    def _is_recovering(self, model: str) -> bool:
        """Whether work that a lost replica left behind goes first."""
        if not self._suspects and not self._returned:
            return False
        return any(r.model == model for r in self._suspects) or any(b.model == model for b in self._returned)

    def submit(self, batch: Batch, now: float) -> None:
        """Stage a batch at the replica that has the least to do. Ask `has_room` first."""
        candidates = [replica for replica in self._replicas if replica.model == batch.model and replica.has_room]
        replica = min(candidates, key=lambda candidate: len(candidate.running))
        self._submit(replica, batch, now)

    def collect(self, now: float, wait: float = 0.0) -> list[Finished]:
        """Return finished batches; waits up to `wait` seconds for the first. Replaces replicas that are gone.

        Raises ModelError where a model cannot start, DeviceLostError where replicas keep dying.
        """
        back: list[Finished] = []
        if wait > 0 and not self._poisoned and not any(self._answers_at_once(replica) for replica in self._replicas):
            self._poller.poll(wait * 1000)
        for replica in self._replicas:
            if replica.state is State.DOWN:
                if now >= replica.relaunch_at:
                    self._launch(replica, now)
            else:
                self._listen(replica, now, back)
        if self._suspects or self._returned:
            self._run_again(now)
        if self._poisoned:
            back += self._poisoned
            self._poisoned = []
        return back

    def _answers_at_once(self, replica: Replica) -> bool:
        return replica.state is not State.DOWN and replica.transport.descriptor() is None

    def drop(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        """Forget the suspects that `unwanted` picks; what a replica is running comes back all the same."""
        gone = [request for request in self._suspects if unwanted(request)]
        self._suspects = deque(request for request in self._suspects if not unwanted(request))
        for batch in self._returned:
            gone += [request for request in batch.requests if unwanted(request)]
            batch.requests = [request for request in batch.requests if not unwanted(request)]
            batch.rows = sum(request.rows for request in batch.requests)
        self._returned = deque(batch for batch in self._returned if batch.requests)
        return gone

    def memory(self) -> dict[str, dict[str, int]]:
        """Return the bytes that each replica reported last, by kind."""
        return {replica.name: replica.memory for replica in self._replicas}

    def stop(self) -> None:
        """End every replica and give the staging memory back."""
        for replica in self._replicas:
            replica.stop()

    def _launch(self, replica: Replica, now: float) -> None:
        replica.launch(now)
        descriptor = replica.transport.descriptor()
        if descriptor is not None:
            self._poller.register(descriptor, select.POLLIN)

    def _submit(self, replica: Replica, batch: Batch, now: float) -> None:
        try:
            replica.submit(batch, now)
        except OSError as error:  # it never got this batch, so nothing is to be held against it
            replica.running.pop()
            self._returned.append(batch)
            self._lost(replica, now, str(error))

    def _listen(self, replica: Replica, now: float, back: list[Finished]) -> None:
        try:
            for message in replica.messages():
                if isinstance(message, Done):
                    self._stillborn = 0
                    back.append(finished(replica, message, now))
                    self._run_left(back[-1].left, now)
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

    def _run_left(self, requests: list[Request], now: float) -> None:
        """Let the requests run again whose outputs the slot had no room for."""
        if requests:
            rows = sum(request.rows for request in requests)
            batch = Batch(next(self._numbers), requests[0].model, requests, rows, Reason.ISOLATION, now)
            self._returned.append(batch)

    def _became_ready(self, replica: Replica, ready: Ready) -> None:
        signature = replica.became_ready(ready)
        self.signatures.setdefault(replica.model, signature)
        fields: dict[str, object] = {
            "replica": replica.name,
            "device": ready.device,
            "load_seconds": round(ready.load_seconds, 3),
            "warm_up_seconds": round(ready.warm_up_seconds, 3),
        }
        if ready.notes:
            fields["notes"] = ready.notes
        self.notices.append(Notice("replica_ready", replica.model, fields))

    def _failed(self, replica: Replica, message: str, now: float) -> None:
        if replica.model not in self.signatures:
            raise ModelError(message)
        self._lost(replica, now, message)

    def _lost(self, replica: Replica, now: float, why: str) -> None:
        """Replace a replica; put its running batch under suspicion and its waiting one back."""
        descriptor = replica.transport.descriptor()
        if descriptor is not None:
            self._poller.unregister(descriptor)
        was_ready = replica.state is State.READY
        if not replica.transport.kill():
            raise DeviceLostError(f"replica {replica.name} is lost ({why}) and cannot be replaced in this process")
        why = f"{why}, {replica.transport.gone()}" if replica.transport.gone() not in (None, why) else why
        if not was_ready and replica.model not in self.signatures:
            raise ModelError(f"the process of model {replica.model} ended before the model was ready: {why}")
        self.restarts += 1
        self._stillborn += 1
        self.notices.append(Notice("replica_lost", replica.model, {"replica": replica.name, "why": why}))
        if self._stillborn > self._limits.max_restarts:
            raise DeviceLostError(f"replicas died {self._stillborn} times without finishing a batch; the last: {why}")
        batches = [batch for batch, _ in replica.running]
        replica.down(now + min(2.0 ** (self._stillborn - 2), 30.0) if self._stillborn > 1 else now)
        if batches:
            self._returned.extend(batches[1:])
            self._suspect(batches[0], why)

    def _suspect(self, batch: Batch, why: str) -> None:
        """Count an attempt against every request of a batch that was running when its replica died.

        Only a request that ran alone is poisoned: among several, the others may be innocent.
        """
        for request in batch.requests:
            request.attempts += 1
        first = batch.requests[0]
        if len(batch.requests) > 1 or first.attempts < self._limits.max_attempts:
            self._suspects.extend(batch.requests)
            return
        failure = Failure(Code.POISONED, f"it brought its replica down {first.attempts} times; the last: {why}")
        self._poisoned.append(Finished(batch, [], [(first, failure)]))

    def _run_again(self, now: float) -> None:
        """Run the requests of a suspect batch one by one, so that a killer takes nobody along twice; then the rest."""
        for replica in self._replicas:
            if not replica.is_idle:
                continue
            request = next((r for r in self._suspects if r.model == replica.model), None)
            if request is not None:
                self._suspects.remove(request)
                batch = Batch(next(self._numbers), replica.model, [request], request.rows, Reason.ISOLATION, now)
                self._submit(replica, batch, now)
                continue
            returned = next((b for b in self._returned if b.model == replica.model), None)
            if returned is not None:
                self._returned.remove(returned)
                self._submit(replica, returned, now)
