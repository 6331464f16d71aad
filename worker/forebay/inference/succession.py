"""Succession: new replicas of a model load beside those that serve, and old ones leave when they have finished.

The pool drives it on the loop's thread; nothing here waits for a process. It must never know why a model is replaced,
nor a request: until they take over, successors get no batch, and what has retired has none left.
"""

from __future__ import annotations

import select
from dataclasses import dataclass, field

from forebay.inference.limits import Limits
from forebay.inference.messages import Failed, Ready
from forebay.inference.replicas import Replica
from forebay.records import Request

_LEAVE_SECONDS = 5.0
"""What a retired replica may take to end by itself; afterwards it is killed."""


@dataclass(slots=True)
class _Successors:
    """The new replicas of one model, what those that are ready have said, and why they cannot take over."""

    replicas: list[Replica]
    told: dict[str, Ready] = field(default_factory=dict)
    failure: str = ""


class Succession:
    """Replicas on their way in and out of one pool."""

    def __init__(self, poller: select.poll, limits: Limits) -> None:
        self._poller = poller
        self._limits = limits
        self._incoming: dict[str, _Successors] = {}
        self.retiring: list[Replica] = []
        self._leaving: list[tuple[Replica, float]] = []

    def __bool__(self) -> bool:
        """Whether a replica is on its way in or out."""
        return bool(self._incoming or self.retiring or self._leaving)

    def begin(self, model: str, replicas: list[Replica], now: float) -> None:
        """Start the successors of a model; `listen` brings them up."""
        successors = self._incoming[model] = _Successors(replicas)
        try:
            for replica in replicas:
                self.launch(replica, now)
        except OSError as error:  # no process, no descriptor, no memory to be had
            self._fail(successors, f"it cannot be started: {error}")

    def launch(self, replica: Replica, now: float) -> None:
        """Start a replica and let its messages wake the loop. Raises OSError where that cannot be had."""
        try:
            replica.launch(now)
        except OSError:
            replica.transport.kill()
            raise
        descriptor = replica.transport.descriptor()
        if descriptor is not None:
            self._poller.register(descriptor, select.POLLIN)

    def listen(self, now: float) -> None:
        """Take in what successors say, and see off what has ended."""
        for successors in self._incoming.values():
            for replica in successors.replicas:
                if not successors.failure:
                    self._hear(successors, replica, now)
        for replica, since in list(self._leaving):
            transport = replica.transport
            if transport.gone() is not None or (now - since > _LEAVE_SECONDS and transport.kill()):
                self._leaving.remove((replica, since))
                replica.stop()

    def failure(self, model: str) -> str:
        """Return why the successors of a model cannot take over; empty where they can, or there are none."""
        found = self._incoming.get(model)
        return found.failure if found is not None else ""

    def ready(self, model: str) -> bool:
        """Whether all successors of a model can take over; True where it has none here."""
        found = self._incoming.get(model)
        return found is None or (not found.failure and len(found.told) == len(found.replicas))

    def first(self, model: str) -> Replica | None:
        """Return one of the successors of a model."""
        found = self._incoming.get(model)
        return found.replicas[0] if found is not None and found.replicas else None

    def switch(
        self, model: str, replicas: list[Replica], now: float
    ) -> tuple[list[Replica], list[tuple[Replica, Ready]]]:
        """Let the successors of a model take over; return all `replicas` now, and the new ones with what they said."""
        found = self._incoming.pop(model, None)
        if found is None:
            return replicas, []
        old = [replica for replica in replicas if replica.model == model]
        for replica in old:
            replica.retire()
        self.retiring += old
        taken = [(replica, found.told[replica.name]) for replica in found.replicas]
        return self.see_off([*replicas, *found.replicas], now), taken

    def abandon(self, model: str) -> None:
        """End the successors of a model at once."""
        found = self._incoming.pop(model, None)
        if found is not None and not found.failure:
            self._fail(found, "abandoned")

    def see_off(self, replicas: list[Replica], now: float) -> list[Replica]:
        """Let retired replicas go that have finished what they had; return the others of `replicas`."""
        done = [replica for replica in self.retiring if not replica.running]
        if not done:
            return replicas
        self.retiring = [replica for replica in self.retiring if replica.running]
        for replica in done:
            self._dismiss(replica, now)
        return [replica for replica in replicas if replica not in done]

    def recall(self, model: str, replicas: list[Replica]) -> tuple[list[Replica], list[Request]]:
        """End the retired replicas of a model at once; return the others, and the requests that are still wanted."""
        ended = [replica for replica in self.retiring if replica.model == model]
        self.retiring = [replica for replica in self.retiring if replica.model != model]
        batches = [batch for replica in ended for batch, _ in replica.running]
        for replica in ended:
            replica.running.clear()
            self._end(replica)
        wanted = [one for batch in batches for one in batch.requests if id(one) not in batch.answered]
        return [replica for replica in replicas if replica not in ended], wanted

    def stop(self) -> None:
        """End everything that is on its way, at once."""
        for model in list(self._incoming):
            self.abandon(model)
        for replica, _ in self._leaving:
            replica.transport.kill()
            replica.stop()
        self._leaving.clear()

    def _hear(self, successors: _Successors, replica: Replica, now: float) -> None:
        """Take in what one successor says; what speaks against it speaks against all."""
        try:
            for message in replica.messages(now):
                if isinstance(message, Ready):
                    replica.became_ready(message)
                    successors.told[replica.name] = message
                elif isinstance(message, Failed):
                    self._fail(successors, message.message)
                    return
        except (EOFError, OSError) as error:
            self._fail(successors, str(error) or "it hung up")
            successors.failure = f"it ended before it took over: {replica.transport.gone() or successors.failure}"
            return
        late = replica.late(now, self._limits.execution_timeout, self._limits.start_timeout)
        if late is not None:
            self._fail(successors, late)

    def _fail(self, successors: _Successors, why: str) -> None:
        successors.failure = why
        for replica in successors.replicas:
            self._end(replica)

    def _dismiss(self, replica: Replica, now: float) -> None:
        """Let a replica end by itself."""
        descriptor = replica.transport.descriptor()
        if descriptor is None:
            replica.stop()
            return
        self._poller.unregister(descriptor)
        replica.transport.hang_up()
        self._leaving.append((replica, now))

    def _end(self, replica: Replica) -> None:
        """End a replica at once; a thread that loads cannot be ended, and is seen off when it is done."""
        descriptor = replica.transport.descriptor()
        if descriptor is not None:
            self._poller.unregister(descriptor)
            if not replica.transport.kill():
                self._leaving.append((replica, float("inf")))
                return
        replica.stop()
