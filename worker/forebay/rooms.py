"""The parts of a worker, as `assembly` makes them and the corridor drives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forebay.batching.batcher import Batcher
from forebay.inference.gain import compare
from forebay.inference.pool import Pool
from forebay.inference.preparers import Preparers
from forebay.inference.replicas import Replica
from forebay.records import Signature
from forebay.settings import ModelSettings
from forebay.stream.committer import Committing
from forebay.stream.credentials import TakesCredentials
from forebay.stream.member import Member
from forebay.stream.offsets import Offsets
from forebay.stream.outbox import Outgoing
from forebay.stream.results import Encoder
from forebay.stream.throttling import Throttling

if TYPE_CHECKING:
    from forebay.tracing import Tracing


@dataclass(slots=True)
class Rooms:
    """The parts of a worker, made and not started; what needs a ready model, or another part, is made by a function."""

    consumer: Member
    pool: Pool
    preparers: Preparers
    make_successors: Callable[[ModelSettings, int], tuple[list[Replica], list[Replica]]]
    make_batcher: Callable[[Signature], Batcher]
    make_outbox: Callable[[Encoder], Outgoing]
    make_committer: Callable[[Outgoing, Offsets], Committing]
    offsets: Offsets = field(default_factory=Offsets)
    throttling: Throttling = field(default_factory=Throttling)
    logins: list[TakesCredentials] = field(default_factory=list)
    """What logs in at Kafka while the worker runs."""
    has_compared: bool = False
    tracing: Tracing | None = None

    @property
    def ready(self) -> bool:
        """Whether every replica and preparer has loaded and warmed up."""
        return self.pool.ready and self.preparers.pool.ready

    def launch(self, now: float) -> None:
        """Start every replica and preparer; `collect` brings them up."""
        self.pool.launch(now)
        self.preparers.pool.launch(now)

    def collect(self, now: float, wait: float) -> None:
        """Take in what they say until they are ready; waits up to `wait` seconds for the first message."""
        self.pool.collect(now, wait)
        self.preparers.collect(now)
        if self.ready and not self.has_compared:
            self.has_compared = True
            compare(self.pool)
