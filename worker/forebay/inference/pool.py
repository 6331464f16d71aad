"""The pool: the replicas of every served model, as the loop sees them. Never blocks on a model; imports no torch.

A replica that dies, hangs, loses its device or computes wrongly (`soundness`) is replaced, and what it left behind runs
again (`leftovers`). The preparers of a worker are a pool, too, of another kind.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from forebay import failpoints
from forebay.errors import DeviceLostError, ModelError
from forebay.inference.leftovers import Leftovers
from forebay.inference.limits import Limits, Notice, cannot_start, on_checked, on_ready, on_stage
from forebay.inference.matching import Finished, finished
from forebay.inference.messages import Checked, Done, Failed, Ready, Stage
from forebay.inference.replicas import Replica, State
from forebay.inference.soundness import Soundness
from forebay.inference.succession import Succession
from forebay.records import Batch, Request, Signature

__all__ = ["Limits", "Notice", "Pool"]


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
        numbers = numbers or count(1)
        self.leftovers = Leftovers(kind, limits.max_attempts, numbers)
        self._soundness = Soundness(limits.canary_interval, numbers)
        self.poller = poller or select.poll()  # two pools that share one wake the loop both
        self._stillborn = self.restarts = 0
        self.succession = Succession(self.poller, limits)
        self.notices: deque[Notice] = deque()
        self.signatures: dict[str, Signature] = {}
        self.curves: dict[str, list[tuple[int, int, float]]] = {}
        self.shares: dict[str, float] = {}

    def launch(self, now: float) -> None:
        """Start every replica; `collect` brings them up. Raises ModelError where nothing more can be started."""
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
        return sum(len(batch.requests) for batch in self._running()) + self.leftovers.requests

    def free_at(self, model: str) -> float | None:
        """Return the predicted time at which a replica of the model can begin another batch; None: none has room.

        0 while one is idle.
        """
        if self.leftovers and self.leftovers.concern(model):  # work that a lost replica left behind goes first
            return None
        return min((r.free_at for r in self._replicas if r.model == model and r.has_room), default=None)

    def submit(self, batch: Batch, now: float) -> None:
        """Stage a batch at the replica that has the least to do. Ask `free_at` first."""
        candidates = [replica for replica in self._replicas if replica.model == batch.model and replica.has_room]
        replica = min(candidates, key=lambda candidate: (candidate.free_at, len(candidate.running)))
        self._submit(replica, batch, now)
        failpoints.hit("after_submit")

    def check_idle(self, now: float, spared: Callable[[str], bool]) -> None:
        """Send canaries to replicas that were idle for long, but for models that are `spared`; costs nothing mostly."""
        for replica, batch in self._soundness.due(self._replicas, now, spared):
            try:
                replica.check(batch, now)
            except OSError as error:
                self._lost(replica, now, str(error))

    @property
    def is_checking(self) -> bool:
        """Whether a canary runs."""
        return any(job.check for replica in self._replicas for _, job in replica.running)

    def collect(self, now: float, wait: float = 0.0) -> list[Finished]:
        """Return finished batches; waits up to `wait` seconds for the first. Replaces replicas that are gone.

        Raises ModelError where a model cannot start, DeviceLostError where replicas keep dying.
        """
        back: list[Finished] = []
        if wait > 0 and not self.leftovers.has_poisoned and not any(one.answers_at_once for one in self._replicas):
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
        if self.succession:
            self.succession.listen(now)
            self._replicas = self.succession.see_off(self._replicas, now)
        if self.leftovers:
            self._run_again(now)
        return back + self.leftovers.poisoned()

    def drop(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        """Forget the suspects that `unwanted` picks; what a replica is running comes back all the same."""
        return self.leftovers.drop(unwanted)

    def stop_steps(self, unwanted: Callable[[Request], bool]) -> None:
        """Take rows out of what runs in steps whose outcome nobody wants; their requests come back without one."""
        for replica in self._replicas:
            replica.stop_steps(unwanted)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests that have not come back and are still wanted; an answer that waits is not looked into."""
        for batch in self._running():
            yield from (one for one in batch.requests if id(one) not in batch.answered)
        yield from self.leftovers

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
        """Return the requests whose deadline passed before their batch ran, or while their rows ran in steps."""

        def is_late(request: Request) -> bool:
            return request.deadline is not None and request.deadline <= now

        found = self.drop(is_late) if self.leftovers else []
        for replica in self._replicas:
            if any(batch.deadline is not None and batch.deadline <= now for batch in replica.behind):
                found += replica.answer_early(is_late)
        return found

    def overdue(self, now: float) -> str | None:
        """Name a replica that runs far beyond its time and was not replaced; None where there is none."""
        return next((why for one in self._replicas if (why := one.overdue(now, self._limits.execution_timeout))), None)

    def memory(self) -> dict[str, dict[str, int]]:
        """Return the bytes that each replica reported last, by kind."""
        return {replica.name: replica.memory for replica in self._replicas}

    def stop(self, *, at_once: bool = False) -> None:
        """End every replica and give the staging memory back; `at_once` where nothing that they do is wanted."""
        for replica in self._replicas:
            if at_once:
                replica.transport.kill()
            replica.stop()
        self.succession.stop()

    def switch(self, model: str, now: float) -> None:
        """Let the successors of a model take over: they get what comes now, the others finish what they have."""
        self._replicas, taken = self.succession.switch(model, self._replicas, now)
        if taken:
            del self.signatures[model], self.curves[model]
        for replica, ready in taken:
            self._became_ready(replica, ready)

    def recall(self, model: str) -> list[Request]:
        """End the retired replicas of a model at once; return the requests that they had and that are wanted."""
        self._replicas, requests = self.succession.recall(model, self._replicas)
        return requests

    def of(self, model: str) -> Iterator[Replica]:
        """Yield the replicas of a model, those that retire among them."""
        return (replica for replica in self._replicas if replica.model == model)

    def _launch(self, replica: Replica, now: float) -> None:
        try:
            self.succession.launch(replica, now)
        except OSError as error:  # no process, no descriptor, no memory to be had: perhaps later
            self._lost(replica, now, cannot_start(error))

    def _submit(self, replica: Replica, batch: Batch, now: float) -> None:
        try:
            replica.submit(batch, now)
        except OSError as error:  # it never got this batch, so nothing is to be held against it
            replica.running.pop()
            self.leftovers.put_back(batch)
            self._lost(replica, now, str(error))

    def _listen(self, replica: Replica, now: float, back: list[Finished]) -> None:
        try:
            for message in replica.messages(now):
                if isinstance(message, Done):
                    self._stillborn = 0
                    self._take(replica, finished(replica, message, now), now, back)
                elif isinstance(message, Checked):
                    if self._checked(replica, message, now):
                        return
                elif isinstance(message, Ready):
                    self._became_ready(replica, message)
                elif isinstance(message, Stage):
                    self.notices.append(on_stage(self.kind, replica.name, replica.model, message))
                elif isinstance(message, Failed):
                    if replica.model not in self.signatures:
                        several = len({one.model for one in self._replicas}) > 1
                        raise ModelError(f"model {replica.model}: {message.message}" if several else message.message)
                    self._lost(replica, now, message.message)
                    return
        except (EOFError, OSError) as error:
            self._lost(replica, now, replica.transport.gone() or str((error.args or ["it hung up"])[-1]))
            return
        late = replica.late(now, self._limits.execution_timeout, self._limits.start_timeout)
        if late is not None:
            self._lost(replica, now, late)

    def _take(self, replica: Replica, done: Finished, now: float, back: list[Finished]) -> None:
        """Take in a batch that came back, or let it run elsewhere where this replica is doubted."""
        counts, broken = self._soundness.weigh(replica, done, self._replicas)
        for other, why in broken:
            self._replace(other, now, why)
        if counts:
            back.append(done)
            self.leftovers.run_alone(done.left, now)  # the slot had no room for their outputs
        else:
            self.leftovers.put_back(done.batch)

    def _checked(self, replica: Replica, checked: Checked, now: float) -> bool:
        """Take in what a canary came to; True where the replica was replaced for it."""
        replica.checked(checked, now)
        why = self._soundness.judge(replica, checked, self._replicas)
        self.notices.append(on_checked(self.kind, replica.name, replica.model, checked))
        if why:
            self._replace(replica, now, why)
        return bool(why)

    def _replace(self, replica: Replica, now: float, why: str) -> None:
        """Replace a replica that computes wrongly: what it has is innocent, and runs again as it was."""
        while replica.running:
            self.leftovers.put_back(replica.running.popleft()[0])
        self._lost(replica, now, why)

    def _became_ready(self, replica: Replica, ready: Ready) -> None:
        signature = replica.became_ready(ready)
        self.signatures.setdefault(replica.model, signature)
        self.curves.setdefault(replica.model, ready.curve)
        self.notices.append(on_ready(self.kind, replica.name, replica.model, ready))

    def _lost(self, replica: Replica, now: float, why: str) -> None:
        """Replace a replica; put its running batch under suspicion and its waiting one back, whatever comes of it."""
        descriptor = replica.transport.descriptor()
        if descriptor is not None:
            self.poller.unregister(descriptor)
        was_ready = replica.state is State.READY
        is_gone, how = replica.transport.kill(), replica.transport.gone()
        why = f"{why}, {how}" if how not in (None, why) else why
        if is_gone and not was_ready and replica.model not in self.signatures:
            ended = f"the process of model {replica.model} ended before the model was ready"
            raise ModelError(f"{ended if how else f'model {replica.model}'}: {why}")
        self.restarts += 1
        self._stillborn += 1
        replica.deaths += 1
        self.leftovers.lost(replica.begun, [batch for batch, _ in replica.running], why)
        in_a_row = max(self._stillborn, replica.deaths)
        replica.down(now + min(2.0 ** (in_a_row - 2), 30.0) if in_a_row > 1 else now)
        self.notices.append(Notice(f"{self.kind}_lost", replica.model, {self.kind: replica.name, "why": why}))
        if not is_gone:
            raise DeviceLostError(f"{self.kind} {replica.name} is lost ({why}) and cannot be replaced in this process")
        if self._stillborn > self._limits.max_restarts:
            many = f"{self.kind}s died {self._stillborn} times"
            raise DeviceLostError(f"{many} without finishing a batch; the last: {why}")

    def _run_again(self, now: float) -> None:
        """Give idle replicas what lost ones left behind."""
        for replica in self._replicas:
            batch = self.leftovers.next(replica.model, now) if replica.is_idle else None
            if batch is not None:
                self._submit(replica, batch, now)
