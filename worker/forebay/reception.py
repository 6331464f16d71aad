"""The corridor's door: a record as read becomes a request that waits for a batch, or an error that leaves at once.

Decoding, the bound on a request's size, and, where `prepare` runs before batching, the way through the preparers. On
the loop's thread; it never waits for a preparer, and knows nothing of Kafka or of what becomes of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from forebay.batching.batcher import Batcher
from forebay.custody import Custody
from forebay.inference.preparers import Preparers
from forebay.records import Code, Failure, Record, Request, Signature
from forebay.settings import Settings
from forebay.stream.codec import Decoder, Refusal

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
        self._decoder = Decoder(
            served,
            settings.limits,
            settings.kafka.reply_topics,
            default_timeout_ms=settings.batch.default_timeout_ms,
            tenant_header=settings.batch.tenant_header,
        )
        self._batch = settings.batch
        self._preparers = preparers
        self._custody = custody
        self._refuse = refuse
        self._batchers = batchers
        self._enter: dict[str, Callable[[Request], None]] = {
            signature.model: preparers.add if signature.prepared else batchers[signature.model].add
            for signature in served
        }
        self._prepared = [batchers[signature.model] for signature in served if signature.prepared]

    def accept(self, records: Sequence[Record], now: float) -> None:
        """Decode records into waiting requests; a record that is no request has its error at once."""
        now_ms = time.time() * 1000
        decode, enter = self._decoder.decode, self._enter
        limit = self._batch.max_batch_bytes
        for record in self._custody.take(records):
            request = decode(record, now, now_ms)
            if type(request) is Request:
                if request.item_bytes <= limit:
                    enter[request.model](request)
                else:
                    self._too_large(request, "the request's tensors have")
            elif isinstance(request, Refusal):
                self._refuse(request, request.failure)

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
        limit = self._batch.max_batch_bytes
        back = self._preparers.collect(now, hold=busy and self.prepared_bytes >= self._batch.max_queue_bytes)
        for request in back.ready:
            if request.item_bytes <= limit:
                self._batchers[request.model].add(request)
            else:
                self._too_large(request, "prepare: what it made has")
        for request, failure in back.failed:
            self._refuse(request, failure)
        return back.seconds

    def _too_large(self, request: Request, what: str) -> None:
        limit = self._batch.max_batch_bytes
        message = f"{what} {request.item_bytes} bytes, batch.max_batch_bytes is {limit}"
        self._refuse(request, Failure(Code.TOO_LARGE, message))
