"""What a request becomes that has no result: the error result for its requester, the dead letter for the operator."""

from __future__ import annotations

from pydantic import Field

from forebay_schemas.codes import ErrorCode
from forebay_schemas.headers import HeaderModel
from forebay_schemas.tensor import WireModel


class ErrorResult(WireModel):
    """The value of a record on the output topic whose header `status` is `error`; always JSON."""

    id: str = Field(description="The request id, which is also the record's key.")
    error: str = Field(description="What went wrong, for a person.")
    code: ErrorCode
    retriable: bool = Field(description="Whether the same request may succeed if it is sent again.")


class DeadLetterHeaders(HeaderModel):
    """The headers that a dead letter adds to the request's own; key and value are the request's, byte for byte.

    The numbers of the original position are as Spring for Apache Kafka writes them: big-endian, not text.
    """

    original_topic: str = Field(alias="kafka_dlt-original-topic")
    original_partition: int = Field(alias="kafka_dlt-original-partition", description="A 4-byte big-endian integer.")
    original_offset: int = Field(alias="kafka_dlt-original-offset", description="An 8-byte big-endian integer.")
    original_timestamp: int = Field(
        alias="kafka_dlt-original-timestamp", description="Unix milliseconds, an 8-byte big-endian integer."
    )
    original_consumer_group: str = Field(alias="kafka_dlt-original-consumer-group")
    exception_fqcn: str = Field(alias="kafka_dlt-exception-fqcn")
    exception_message: str = Field(alias="kafka_dlt-exception-message")
    error_code: ErrorCode = Field(alias="forebay-error-code")
    attempts: int = Field(alias="forebay-attempts", description="How often the request ran.")
    replays: int | None = Field(
        default=None, alias="forebay-replays", description="How often `forebay dlq replay` has sent the request again."
    )
