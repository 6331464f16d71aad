"""Encoding: the outputs of a batch become result records, a failure becomes an error result and a dead letter.

A result travels in its request's own encoding. What is equal for a whole batch is made once per batch; per row
there is one slice, one join and one list of headers. Runs in the loop's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import orjson

from forebay.errors import RequestError
from forebay.records import Code, Encoding, Failure, Headers, Outcome, Output, Reply, Request, Signature
from forebay.stream.codec import Refusal
from forebay.stream.tensors import ITEM_BYTES

_NUMPY = {
    "BOOL": "?",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
    **{f"INT{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
}
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
_MAX_MESSAGE = 2_000


class Encoder:
    """Encodes the outcomes of one worker's requests. `group_id` is named in the dead letters."""

    def __init__(self, signatures: Sequence[Signature], output_topic: str, group_id: str) -> None:
        self._signatures = {signature.model: signature for signature in signatures}
        self._output_topic = output_topic
        self._group = group_id.encode()

    def results(self, requests: Sequence[Request], outputs: Sequence[Output], batch_size: int) -> list[Outcome]:
        """Encode the results of `requests`, whose rows lie one after the other in `outputs`.

        `batch_size` is the number of rows that ran together. A row that cannot be encoded becomes an error.
        """
        signature = self._signatures[requests[0].model]
        common: Headers = [
            ("status", b"ok"),
            ("model", signature.model.encode()),
            ("model-version", signature.version.encode()),
            ("batch-size", b"%d" % batch_size),
        ]
        rows = _Rows(signature, outputs)
        made: list[Outcome] = []
        start = 0
        for request in requests:
            end = start + request.rows
            try:
                value, kind = rows.encode(request, start, end)
            except RequestError as error:
                made.append(self.error(request, error.failure))
            else:
                made.append(self._outcome(request, value, common + kind))
            start = end
        return made

    def error(self, request: Request | Refusal, failure: Failure, batch_size: int = 0) -> Outcome:
        """Encode an error result: JSON with a sentence for a person and a code for programs.

        `batch_size` is the rows of the batch that it was part of, 0 if it never ran.
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
        signature = self._signatures.get(request.model)
        if signature is not None:
            headers.append(("model-version", signature.version.encode()))
        outcome = self._outcome(request, orjson.dumps(body), headers)
        outcome.failure = failure
        return outcome

    def too_large(self, outcome: Outcome, message: str) -> Outcome:
        """Encode the error that takes the place of a result which its topic does not take."""
        where = Reply(outcome.topic, outcome.partition)
        failure = Failure(Code.RESULT_TOO_LARGE, message)
        refusal = Refusal(outcome.record, outcome.id, outcome.model, failure, outcome.arrived, where, outcome.echo)
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
            self._output_topic if reply is None else reply.topic,
            None if reply is None else reply.partition,
            value,
            headers,
            request.model,
            request.arrived,
            request.echo,
            None,
            request.attempts + 1,
        )


class _Rows:
    """The outputs of a batch, sliced row by row in either encoding."""

    def __init__(self, signature: Signature, outputs: Sequence[Output]) -> None:
        self._outputs = outputs
        self._specs = signature.outputs
        self._row_bytes = [
            prod(output.dims) * ITEM_BYTES.get(spec.datatype, 0)
            for spec, output in zip(signature.outputs, outputs, strict=True)
        ]
        self._arrays: list[np.ndarray[Any, Any] | None] = [None] * len(outputs)
        names = {"model_name": signature.model, "model_version": signature.version}
        self._start = orjson.dumps(names)[:-1] + b',"id":'

    def encode(self, request: Request, start: int, end: int) -> tuple[bytes, Headers]:
        """Return the value of a result and the headers that its encoding needs."""
        indices = request.wanted or range(len(self._outputs))
        head = self._start + orjson.dumps(request.id)
        if request.encoding is Encoding.JSON:
            parts = [head, b',"outputs":[']
            for index in indices:
                parts += (self._described(index, end - start, b""), self._as_json(index, start, end), b"},")
            parts[-1] = b"}]}"
            return b"".join(parts), [("content-type", b"application/json")]
        tails: list[bytes] = []
        raws: list[bytes] = []
        for index in indices:
            raw = self._as_binary(index, start, end)
            raws.append(raw)
            tails.append(self._described(index, end - start, b"%d" % len(raw)))
        head += b',"outputs":[' + b",".join(tails) + b"]}"
        headers: Headers = [
            ("content-type", b"application/octet-stream"),
            ("inference-header-content-length", b"%d" % len(head)),
        ]
        return head + b"".join(raws), headers

    def _described(self, index: int, rows: int, size: bytes) -> bytes:
        spec = self._specs[index]
        return _describe(spec.name, spec.datatype, rows, self._outputs[index].dims, size)

    def _as_binary(self, index: int, start: int, end: int) -> bytes:
        content = self._outputs[index].content
        width = self._row_bytes[index]
        if isinstance(content, bytes):
            return content[start * width : end * width]
        count = prod(self._outputs[index].dims)
        chosen = content[start * count : end * count]
        return b"".join([len(element).to_bytes(4, "little") + element for element in chosen])

    def _as_json(self, index: int, start: int, end: int) -> bytes:
        output = self._outputs[index]
        count = prod(output.dims)
        if isinstance(output.content, list):
            try:
                return orjson.dumps([part.decode() for part in output.content[start * count : end * count]])
            except UnicodeDecodeError:
                name = self._specs[index].name
                raise RequestError(
                    Code.UNSUPPORTED_TYPE,
                    f"output {name} has bytes that are not UTF-8, so JSON cannot carry it; send the request in binary",
                ) from None
        array = self._arrays[index]
        if array is None:
            array = self._arrays[index] = _array(self._specs[index].datatype, output.content)
        return orjson.dumps(array[start * count : end * count], option=_OPTIONS)


@lru_cache(maxsize=4096)
def _describe(name: str, datatype: str, rows: int, dims: tuple[int, ...], size: bytes) -> bytes:
    """Return the JSON of an output up to its data (`size` empty) or whole, with its binary size."""
    if not size and datatype in ("FP16", "BF16"):
        datatype = "FP32"
    fields: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [rows, *dims]}
    if size:
        fields["parameters"] = {"binary_data_size": int(size)}
        return orjson.dumps(fields)
    return orjson.dumps(fields)[:-1] + b',"data":'


def _array(datatype: str, content: bytes) -> np.ndarray[Any, Any]:
    if datatype == "BF16":
        return (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4")
    array = np.frombuffer(content, _NUMPY[datatype])
    return array.astype("<f4") if datatype == "FP16" else array
