"""Kafka record headers: their names as constants, and models of the sets that requests and results carry.

Values are bytes on the wire. `kafka_correlationId` and `correlation_id` are opaque. `kafka_replyPartition` and
`kafka_dlt-original-partition` are 4-byte, `kafka_dlt-original-offset` and `-timestamp` 8-byte big-endian integers.
Every other value is text, UTF-8.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

CONTENT_TYPE = "content-type"
JSON_LENGTH = "inference-header-content-length"
REQUEST_ID = "x-request-id"
CORRELATION_ID = "kafka_correlationId"
CORRELATION_ID_PLAIN = "correlation_id"
REPLY_TOPIC = "kafka_replyTopic"
REPLY_PARTITION = "kafka_replyPartition"
TIMEOUT_MS = "timeout-ms"
DEADLINE_MS = "deadline-ms"
PRIORITY = "priority"
MODEL = "model"
MODEL_VERSION = "model-version"
MLSERVER_MODEL = "mlserver-model"
MLSERVER_VERSION = "mlserver-version"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
BAGGAGE = "baggage"
CLOUD_EVENTS_PREFIX = "ce_"

STATUS = "status"
ERROR_CODE = "error-code"
SOURCE = "source"
BATCH_SIZE = "batch-size"

DLT_TOPIC = "kafka_dlt-original-topic"
DLT_PARTITION = "kafka_dlt-original-partition"
DLT_OFFSET = "kafka_dlt-original-offset"
DLT_TIMESTAMP = "kafka_dlt-original-timestamp"
DLT_GROUP = "kafka_dlt-original-consumer-group"
DLT_EXCEPTION = "kafka_dlt-exception-fqcn"
DLT_MESSAGE = "kafka_dlt-exception-message"
DLT_CODE = "forebay-error-code"
DLT_ATTEMPTS = "forebay-attempts"
REPLAYS = "forebay-replays"

DEAD_LETTER_HEADERS = (
    DLT_TOPIC,
    DLT_PARTITION,
    DLT_OFFSET,
    DLT_TIMESTAMP,
    DLT_GROUP,
    DLT_EXCEPTION,
    DLT_MESSAGE,
    DLT_CODE,
    DLT_ATTEMPTS,
)
"""What a dead letter adds to the headers of its request, in this order."""

JSON = "application/json"
BINARY = "application/octet-stream"
OK = "ok"
ERROR = "error"


class HeaderModel(BaseModel):
    """Text headers by their names on the wire; headers of others are allowed beside them."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class RequestHeaders(HeaderModel):
    """The headers of a request; every one is optional."""

    content_type: str | None = Field(
        default=None, alias=CONTENT_TYPE, description=f"{JSON}, which is the default, or {BINARY}."
    )
    json_length: str | None = Field(
        default=None, alias=JSON_LENGTH, pattern=r"^\d+$", description=f"Bytes of JSON in the value; with {BINARY}."
    )
    request_id: str | None = Field(default=None, alias=REQUEST_ID, description="Precedes the body's id and the key.")
    correlation_id: str | None = Field(
        default=None, alias=CORRELATION_ID, description="Opaque bytes, echoed unchanged."
    )
    correlation_id_plain: str | None = Field(
        default=None, alias=CORRELATION_ID_PLAIN, description="Opaque bytes, echoed unchanged."
    )
    reply_topic: str | None = Field(
        default=None, alias=REPLY_TOPIC, description="Where the result goes, if the worker allows that topic."
    )
    reply_partition: str | None = Field(
        default=None, alias=REPLY_PARTITION, description="A 4-byte big-endian integer: the partition of that topic."
    )
    timeout_ms: str | None = Field(
        default=None, alias=TIMEOUT_MS, pattern=r"^\d+$", description="Expires this long after the record's timestamp."
    )
    deadline_ms: str | None = Field(
        default=None, alias=DEADLINE_MS, pattern=r"^\d+$", description="Expires at this Unix time in milliseconds."
    )
    priority: str | None = Field(default=None, alias=PRIORITY, pattern=r"^\d+$", description="1 is highest.")
    model: str | None = Field(default=None, alias=MODEL, description="Absent: the worker's default model.")
    model_version: str | None = Field(default=None, alias=MODEL_VERSION)
    mlserver_model: str | None = Field(default=None, alias=MLSERVER_MODEL, description="Read where `model` is absent.")
    mlserver_version: str | None = Field(default=None, alias=MLSERVER_VERSION)
    traceparent: str | None = Field(default=None, alias=TRACEPARENT, description="W3C trace context.")
    tracestate: str | None = Field(default=None, alias=TRACESTATE)
    baggage: str | None = Field(default=None, alias=BAGGAGE)


class ResultHeaders(HeaderModel):
    """The headers of an outcome, result or error; the request's echoed ones stand beside them."""

    status: str = Field(alias=STATUS, pattern=r"^(ok|error)$")
    source: str = Field(alias=SOURCE, description="TOPIC/PARTITION/OFFSET of the request record.")
    content_type: str = Field(alias=CONTENT_TYPE)
    error_code: str | None = Field(default=None, alias=ERROR_CODE, description="With status error.")
    json_length: str | None = Field(default=None, alias=JSON_LENGTH, pattern=r"^\d+$")
    model: str | None = Field(default=None, alias=MODEL)
    model_version: str | None = Field(default=None, alias=MODEL_VERSION)
    batch_size: str | None = Field(
        default=None, alias=BATCH_SIZE, pattern=r"^\d+$", description="Rows of the batch that ran the request."
    )
    correlation_id: str | None = Field(default=None, alias=CORRELATION_ID, description="As the request had it.")
    correlation_id_plain: str | None = Field(
        default=None, alias=CORRELATION_ID_PLAIN, description="As the request had it."
    )
