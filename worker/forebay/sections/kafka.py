"""The settings of the cluster, the topics and the consumer group, and how to reach a protected cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from forebay.sections.base import Names, Section


class Tls(Section):
    """TLS files, PEM. The peer's certificate and name are verified unless `verify` is false."""

    ca_file: Path | None = Field(None, description="the authorities to trust; default the system's")
    certificate_file: Path | None = Field(None, description="this client's certificate, for mutual TLS")
    key_file: Path | None = Field(None, description="its private key")
    key_password: SecretStr | None = Field(None, description="of the private key")
    verify: bool = Field(True, description="check the broker's certificate and name")


class Security(Section):
    """How to reach a protected cluster."""

    protocol: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = Field(
        "plaintext", description="how to talk to the brokers"
    )
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = Field(
        None, description="SASL mechanism; needed by the sasl protocols"
    )
    username: str | None = Field(None, description="for PLAIN and SCRAM")
    password: SecretStr | None = Field(None, description="for PLAIN and SCRAM; better from a file or the environment")
    tls: Tls = Tls()

    @model_validator(mode="after")
    def _complete(self) -> Security:
        if self.protocol.startswith("sasl") and self.mechanism is None:
            raise ValueError(f"protocol {self.protocol} needs mechanism, for example SCRAM-SHA-512")
        if self.mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512") and not (self.username and self.password):
            raise ValueError(f"mechanism {self.mechanism} needs username and password")
        return self


class Kafka(Section):
    """The cluster, the topics and the consumer group."""

    bootstrap_servers: str = Field("localhost:9092", description="HOST:PORT,HOST:PORT to start from")
    input_topics: Names = Field(("inference.requests",), description="topics of requests")
    output_topic: str = Field("inference.results", description="topic of results and errors")
    dead_letter_topic: str = Field(
        "inference.dead-letters", description="topic of the operator's copies of failed requests"
    )
    group_id: str = Field("forebay", description="consumer group; workers that share it share the load")
    reply_topics: Names = Field((), description="patterns of topics that a request may name for its result")
    auto_offset_reset: Literal["earliest", "latest", "error"] = Field(
        "earliest", description="where to start where the group has no offset yet"
    )
    offset_out_of_range: Literal["stop", "skip"] = Field(
        "stop",
        description="what to do where requests were deleted before they were answered: stop and say how many, or skip "
        "and count them",
    )
    group_protocol: Literal["classic", "consumer"] = Field("classic", description="consumer is KIP-848, for Kafka 4")
    security: Security = Security()
    client: Mapping[str, str | int | float | bool] = Field(
        default_factory=dict, description="any librdkafka key; one that would break a guarantee is refused"
    )

    @model_validator(mode="after")
    def _topics_differ(self) -> Kafka:
        if not self.input_topics or not all(self.input_topics):
            raise ValueError("input_topics must name at least one topic")
        for name in ("output_topic", "dead_letter_topic"):
            if getattr(self, name) in self.input_topics:
                raise ValueError(f"{name} is also an input topic: the worker would feed itself for ever")
        return self

    @field_validator("reply_topics")
    @classmethod
    def _are_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"{pattern!r} is not a regular expression ({error}); for all topics write .*"
                ) from error
        return patterns
