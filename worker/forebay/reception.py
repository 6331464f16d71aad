"""The corridor's door: a record as read becomes a request that waits for a batch, or an error that leaves at once.

Decoding, the bound on a request's size, and, where `prepare` runs before batching, the way through the preparers. On
the loop's thread; it never waits for a preparer, and knows nothing of Kafka or of what becomes of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from forebay.batching.batcher import Batcher
from forebay.custody import Custody
from forebay.inference.preparers import Preparers
from forebay.logs import logger
from forebay.records import Code, Failure, Outcome, Record, Request, Signature
from forebay.settings import Settings
from forebay.stream.codec import Decoder, Refusal
from forebay.stream.duplicates import Asked, Duplicates, Fate
from forebay.stream.lookback import Lookback

_log = logger("worker")
Refuse = Callable[[Request | Refusal, Failure], None]


class Reception:
    """Takes records in. `refuse` sends the error of a request that does not get as far as a batch."""

    def __init__(
        self,
        served: Sequence[Signature],
        settings: Settings,
        preparers: Preparers,
        custody: Custody,
        batchers: Mapping[str, Batcher],
        refuse: Refuse,
    ) -> None:
        self._make_decoder = partial(
            Decoder,
            limits=settings.limits,
            reply_topics=settings.kafka.reply_topics,
            default_timeout_ms=settings.batch.default_timeout_ms,
            tenant_header=settings.batch.tenant_header,
        )
        self._decoder = self._make_decoder(served)
        self._batch = settings.batch
        most = settings.batch.max_batch_bytes
        self._most = {one.model: min(one.room, most) if one.room else most for one in served}
        self._least = min(self._most.values(), default=most)  # what every model takes
        self._preparers = preparers
        self._custody = custody
        self._refuse = refuse
        self._batchers = batchers
        self._enter: dict[str, Callable[[Request], None]] = {
            signature.model: preparers.add if signature.prepared else batchers[signature.model].add
            for signature in served
        }
        self._prepared = [batchers[signature.model] for signature in served if signature.prepared]

    def renew(self, served: Sequence[Signature]) -> None:
        """Decode for these versions from now on; their tensors are those of the versions before."""
        self._decoder = self._make_decoder(served)

    def again(self, requests: Sequence[Request], now: float) -> None:
        """Decode requests anew that were made ready for a version that is gone; they keep their age and deadline."""
        now_ms = time.time() * 1000
        for request in requests:
            fresh = self._decoder.decode(request.record, now, now_ms)
            if isinstance(fresh, Refusal):
                self._refuse(fresh, fresh.failure)
                continue
            fresh.arrived, fresh.deadline, fresh.attempts = request.arrived, request.deadline, request.attempts
            self._enter[fresh.model](fresh)

    def accept(self, records: Sequence[Record], now: float) -> None:
        """Decode records into waiting requests; a record that is no request has its error at once."""
        now_ms = time.time() * 1000
        if self._custody.lookback is not None:
            self._accept_once(self._custody.lookback, records, now, now_ms)
            return
        decode, enter = self._decoder.decode, self._enter
        limit = self._least
        for record in self._custody.take(records):
            request = decode(record, now, now_ms)
            if type(request) is Request:
                if request.item_bytes <= limit or request.item_bytes <= self._most[request.model]:
                    enter[request.model](request)
                else:
                    self._too_large(request, "the request's tensors have")
            elif isinstance(request, Refusal):
                self._refuse(request, request.failure)

    def _accept_once(self, lookback: Lookback, records: Sequence[Record], now: float, now_ms: float) -> None:
        """Do the same where an id gets one outcome within a window."""
        duplicates, identify = lookback.duplicates, self._decoder.identify

        def remember(record: Record) -> None:
            duplicates.remember(record, identify(record), now_ms)

        present = lookback.sift(records, now_ms, remember)
        taken = self._custody.take(present)
        left = None if len(taken) == len(present) else set(map(id, taken))
        repeated: list[Record] = []
        for record in present:
            if left is not None and id(record) not in left:
                remember(record)  # finished by an earlier owner
                continue
            request = self._decoder.decode(record, now, now_ms)
            fate = duplicates.admit(request, now_ms)
            if fate is Fate.FIRST:
                self._admit(request)
            elif fate is Fate.REPEATS:
                repeated.append(record)
        self._pass_over(duplicates, repeated)

    def answered(self, outcomes: Sequence[Outcome]) -> None:
        """Finish the duplicates of requests whose outcome is acknowledged, or let one of them have its try."""
        if self._custody.lookback is None:
            return
        duplicates, repeated = self._custody.lookback.duplicates, []
        for outcome in outcomes:
            if self._custody.offsets.holds(outcome.record):
                retriable = outcome.failure is not None and outcome.failure.retriable
                finished, following = duplicates.answered(outcome.record, retriable=retriable)
                repeated += [asked.record for asked in finished]
                if following is not None:
                    self._admit(following)
        self._pass_over(duplicates, repeated)

    def _pass_over(self, duplicates: Duplicates, records: list[Record]) -> None:
        if records:
            duplicates.repeated += len(records)
            self._custody.pass_over(records)
            _log.debug("duplicates", records=len(records), first=records[0].source, last=records[-1].source)

    def _admit(self, asked: Asked) -> None:
        """Let a request wait for its batch; what cannot has its error at once."""
        if isinstance(asked, Refusal):
            self._refuse(asked, asked.failure)
        elif isinstance(asked, Request):
            if asked.item_bytes <= self._most[asked.model]:
                self._enter[asked.model](asked)
            else:
                self._too_large(asked, "the request's tensors have")

    @property
    def prepared_bytes(self) -> int:
        """Bytes of prepared tensors that wait for a batch, beside the records that they came from."""
        return sum(batcher.bytes for batcher in self._prepared)

    def advance(self, now: float, *, busy: bool) -> dict[str, list[float]]:
        """Let what the preparers have done wait for a batch; returns the seconds of each `prepare`, by model.

        While the replicas are `busy`, no more is prepared ahead than `batch.max_queue_bytes`.
        """
        if not self._prepared:
            return {}
        back = self._preparers.collect(now, hold=busy and self.prepared_bytes >= self._batch.max_queue_bytes)
        for request in back.ready:
            if request.item_bytes <= self._most[request.model]:
                self._batchers[request.model].add(request)
            else:
                self._too_large(request, "prepare: what it made has")
        for request, failure in back.failed:
            self._refuse(request, failure)
        return back.seconds

    def _too_large(self, request: Request, what: str) -> None:
        limit, most = self._batch.max_batch_bytes, self._most[request.model]
        message = f"{what} {request.item_bytes} bytes, batch.max_batch_bytes is {limit}"
        if most < limit:
            message += f", of which one of up to batch.max_batch_size requests that run in steps may have {most}"
        self._refuse(request, Failure(Code.TOO_LARGE, message))
