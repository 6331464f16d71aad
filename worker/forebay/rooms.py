"""The parts of a worker, as `assembly` makes them and the corridor drives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forebay.batching.batcher import Batcher
from forebay.inference.pool import Pool
from forebay.inference.preparers import Preparers
from forebay.records import Signature
from forebay.stream.committer import Committing
from forebay.stream.consumer import Member
from forebay.stream.offsets import Offsets
from forebay.stream.outbox import Outgoing
from forebay.stream.results import Encoder


@dataclass(slots=True)
class Rooms:
    """The parts of a worker, made and not started; what needs a ready model, or another part, is made by a function."""

    consumer: Member
    pool: Pool
    preparers: Preparers
    make_batcher: Callable[[Signature], Batcher]
    make_outbox: Callable[[Encoder], Outgoing]
    make_committer: Callable[[Outgoing, Offsets], Committing]
