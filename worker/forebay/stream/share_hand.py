"""One client of a share group and the wave that it has; a member of queue mode has a few. The loop's thread owns it.

What is decided about a record is told to the client at once, and reaches the broker with the next fetch or by `serve`.
The broker's answers come inside the client's calls; an exception must never leave that callback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import confluent_kafka as ck

from forebay.records import Partition
from forebay.stream.leases import Verdict, Wave

_ANSWER_SECONDS = 30.0
"""After this an answer is not waited for any more: a broker that died took it along."""

_TYPES = {Verdict.ACCEPT: ck.AcknowledgeType.ACCEPT, Verdict.RELEASE: ck.AcknowledgeType.RELEASE}


class Hand:
    """A client with at most one wave. `on_answer` gets the broker's answers: errors by partition, empty where none."""

    def __init__(self, client: Any, on_answer: Callable[[dict[Partition, str]], None]) -> None:
        self._client = client
        self._on_answer = on_answer
        self._told = 0
        self.wave: Wave | None = None
        self.asking = False
        """Whether it fetches until something comes; from the first poll on it does so by itself."""
        self._polled_at = 0.0
        self._sent_at = 0.0
        self.unanswered = 0
        client.set_acknowledgement_commit_callback(self._answered)

    @property
    def untold(self) -> bool:
        """Whether the broker has not heard of something that was decided."""
        return self._told > 0 or (self.wave is not None and bool(self.wave.verdicts))

    def poll(self, wait: float, now: float) -> tuple[float, list[Any]]:
        """Return the messages of a new wave, if there are any, and since when they may be locked.

        What was told travels with the fetch.
        """
        since = self._polled_at if self.asking else now
        self._polled_at = now
        self.asking = True
        self._sends(now)  # before: the answer may come inside the call
        messages = list(self._client.poll(wait))
        self.asking = not messages
        return since, messages

    def _sends(self, now: float) -> None:
        if self._told:
            self.unanswered, self._told = self.unanswered + self._told, 0
            self._sent_at = now

    def settle(self, now: float, *, send: bool) -> None:
        """Tell the client what was decided, and let answers come in; `send` sends it now, else the next fetch does.

        Nothing is told while an answer is missing: the client (2.16) joins what it gets meanwhile in the order in which
        it came, and the broker refuses all of a request whose offsets do not rise (INVALID_REQUEST).
        """
        if self.unanswered:
            self._client.commit_async()  # nothing is told and not sent: this only takes answers in
            if now - self._sent_at > _ANSWER_SECONDS:
                self.unanswered = 0
        if self.unanswered or (self.wave is None and not self._told):
            return
        if send or (self.wave is not None and not self.wave.left):
            self._tell()
        if send and self._told:
            self._sends(now)
            self._client.commit_async()

    def _tell(self) -> None:
        for (topic, partition, offset), verdict in self.wave.told() if self.wave is not None else ():
            try:
                self._client.acknowledge_offset(topic, partition, offset, _TYPES[verdict])
            except ck.IllegalStateException:
                continue  # an error event that needs no answer
            self._told += 1

    def give_back(self) -> None:
        """Decide that what is left of the wave goes back."""
        if self.wave is not None:
            for place in list(self.wave.left):
                self.wave.judge(place, Verdict.RELEASE)

    def take_credentials(self, username: str, password: str) -> None:
        """Let the client log in by these."""
        self._client.set_sasl_credentials(username, password)

    def close(self) -> None:
        """Send what was decided and leave the group."""
        self._tell()
        self._client.close()

    def _answered(self, offsets: Any, error: Any) -> None:
        try:
            self.unanswered = max(0, self.unanswered - sum(len(found) for found in offsets.values()))
            name = error.args[0].name() if error is not None else ""
            self._on_answer({Partition(p.topic, p.partition): name for p in offsets} if name else {})
        except Exception:  # an exception here would leave through the client's call
            self.unanswered = 0
