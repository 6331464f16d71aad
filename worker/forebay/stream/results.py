"""Encoding: the outputs of a batch become result records, a failure becomes an error result and a dead letter.

A result travels in its request's own encoding. What is equal for a whole batch is made once per batch; per row
there is one slice, one join and one list of headers. Runs in the loop's thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from forebay.errors import RequestError
from forebay.records import Code, Failure, Headers, Outcome, Output, Reply, Request, Signature
from forebay.stream.codec import Refusal
from forebay.stream.rows import Rows

_MAX_MESSAGE = 2_000


class Encoder:
    """Encodes the outcomes of one worker's requests. `group_id` is named in the dead letters."""

    def __init__(self, signatures: Sequence[Signature], output_topic: str, group_id: str) -> None:
        self._signatures = {signature.model: signature for signature in signatures}
        self.output_topic = output_topic
        self._group = group_id.encode()

    def renew(self, signature: Signature) -> None:
        """Take over a model's new version, for the errors of requests that ran nowhere."""
        self._signatures[signature.model] = signature

    def results(
        self,
        requests: Sequence[Request],
        outputs: Sequence[Output],
        batch_size: int,
        signature: Signature | None = None,
    ) -> list[Outcome]:
        """Encode the results of `requests`, whose rows lie one after the other in `outputs`.

        `batch_size` is the number of rows that ran together, `signature` that of the replica which ran them. A row that
        cannot be encoded becomes an error.
        """
        signature = signature or self._signatures[requests[0].model]
        encode, outcome = Rows(signature, outputs, batch_size).encode, self._outcome
        made: list[Outcome] = []
        start = 0
        for request in requests:
            end = start + request.rows
            try:
                value, headers = encode(request, start, end)
            except RequestError as error:
                made.append(self.error(request, error.failure, batch_size, signature))
            else:
                made.append(outcome(request, value, headers))
            start = end
        return made

    def error(
        self, request: Request | Refusal, failure: Failure, batch_size: int = 0, signature: Signature | None = None
    ) -> Outcome:
        """Encode an error result: JSON with a sentence for a person and a code for programs.

        `batch_size` is the rows of the batch that it was part of, 0 if it never ran; `signature` as for `results`.
        """
        message = failure.message[:_MAX_MESSAGE]
        body = {"id": request.id, "error": message, "code": failure.code.value, "retriable": failure.retriable}
        headers: Headers = [
            ("status", b"error"),
            ("error-code", failure.code.value.encode()),
            ("model", request.model.encode()),
            ("batch-size", b"%d" % batch_size),
            ("content-type", b"application/json"),
        ]
        signature = signature or self._signatures.get(request.model)
        if signature is not None:
            headers.append(("model-version", signature.version.encode()))
        outcome = self._outcome(request, orjson.dumps(body), headers)
        outcome.failure = failure
        if failure.code is Code.POISONED:
            outcome.attempts = request.attempts  # no run beyond those that it brought down
        return outcome

    def too_large(self, outcome: Outcome, message: str) -> Outcome:
        """Encode the error that takes the place of a result which its topic does not take."""
        where = Reply(outcome.topic, outcome.partition)
        failure = Failure(Code.RESULT_TOO_LARGE, message)
        refusal = Refusal(outcome.record, outcome.id, outcome.model, failure, outcome.arrived, where, outcome.echo)
        return self.error(refusal, failure)

    def turned_back(self, outcome: Outcome, why: str) -> Outcome:
        """Encode the error that goes to the output topic in place of a result whose reply topic cannot take it."""
        failure = Failure(Code.REPLY_NOT_ALLOWED, f"the reply topic {outcome.topic!r} cannot be written: {why}")
        refusal = Refusal(outcome.record, outcome.id, outcome.model, failure, outcome.arrived, None, outcome.echo)
        return self.error(refusal, failure)

    def dead_letter(self, outcome: Outcome) -> Headers | None:
        """Return the headers of the dead letter that goes with an error, or None where none does."""
        failure = outcome.failure
        if failure is None or failure.code is Code.DEADLINE_EXCEEDED:
            return None
        record = outcome.record
        return [
            *record.headers,
            ("kafka_dlt-original-topic", record.topic.encode()),
            ("kafka_dlt-original-partition", record.partition.to_bytes(4, "big")),
            ("kafka_dlt-original-offset", record.offset.to_bytes(8, "big")),
            ("kafka_dlt-original-timestamp", max(record.timestamp_ms, 0).to_bytes(8, "big")),
            ("kafka_dlt-original-consumer-group", self._group),
            ("kafka_dlt-exception-fqcn", f"forebay.{failure.code.value}".encode()),
            ("kafka_dlt-exception-message", failure.message[:_MAX_MESSAGE].encode()),
            ("forebay-error-code", failure.code.value.encode()),
            ("forebay-attempts", b"%d" % max(outcome.attempts, 1)),
        ]

    def _outcome(self, request: Request | Refusal, value: bytes, headers: Headers) -> Outcome:
        record = request.record
        headers.append(("source", f"{record.topic}/{record.partition}/{record.offset}".encode()))
        if request.echo:
            headers += request.echo
        reply = request.reply
        return Outcome(
            record,
            request.id,
            self.output_topic if reply is None else reply.topic,
            None if reply is None else reply.partition,
            value,
            headers,
            request.model,
            request.arrived,
            request.echo,
            None,
            request.attempts + 1,
        )
