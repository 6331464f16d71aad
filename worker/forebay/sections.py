"""The sections of a worker's settings: frozen, each with its bounds and the sentence that the reference page shows.

Edge code: pydantic is welcome here and nowhere on the hot path. A room gets its section, never the whole settings;
`forebay.settings` puts the sections together and reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode


def _split(value: object) -> object:
    """Accept `a,b` and a YAML list where a list is wanted, so that an environment variable needs no JSON."""
    if isinstance(value, str):
        parsed = yaml.safe_load(value) if value.startswith("[") else value.split(",")
        return [str(part).strip() for part in parsed]
    return value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Sizes = Annotated[tuple[int, ...], NoDecode, BeforeValidator(_split)]


class Section(BaseModel):
    """The base of every section: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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


class Delivery(Section):
    """What is promised about outcomes, and how long endings may take."""

    guarantee: Literal["at_least_once", "exactly_once"] = Field(
        "at_least_once", description="what holds when something dies: see docs/guarantees.md"
    )
    ordering: Literal["none", "partition", "key"] = Field(
        "none", description="none: as they finish; partition, key: in the input's order; exactly_once: always partition"
    )
    max_attempts: int = Field(3, ge=1, description="runs of a request that kills its replica, before it is poisoned")
    breaker: bool = Field(
        True,
        description="a batch that fails whole is answered only if the model still runs its warm-up example; else it "
        "waits, and the worker is not ready, until the model works again; false: every failure is answered",
    )
    drain_timeout_ms: int = Field(
        25_000, ge=0, description="for what is in flight at SIGTERM; keep it below the orchestrator's grace period"
    )
    revoke_timeout_ms: int = Field(5_000, ge=0, description="how long a revoked partition may hold up the group")
    commit_interval_ms: int = Field(200, ge=1, description="between two commits of the low watermarks")
    transactional_id: str | None = Field(
        None,
        description="exactly_once: stable, unique per worker; default GROUP-HOST-N with the lowest N free on the host",
    )
    transaction_timeout_ms: int = Field(
        10_000, ge=1_000, description="exactly_once: after this a successor may take over from a dead worker"
    )

    @property
    def order_of_results(self) -> Literal["none", "partition", "key"]:
        """The order that is kept: a transaction's offset covers a prefix of its partition, so it needs that order."""
        return "partition" if self.guarantee == "exactly_once" else self.ordering


class Batch(Section):
    """The bounds of a micro-batch, and of what waits in front of it."""

    max_batch_size: int = Field(32, ge=1, description="most rows of a batch")
    max_wait_ms: float = Field(
        5.0, ge=0, allow_inf_nan=False, description="from the oldest request's arrival; used by linger"
    )
    dispatch: Literal["eager", "linger", "static", "defer"] = Field(
        "eager",
        description="eager: never idle while a request waits; linger: wait to fill; static: full batches only; "
        "defer: as late as the deadlines allow, for a GPU that is shared or metered",
    )
    linger_for: Literal["arrivals", "backlog"] = Field(
        "arrivals",
        description="what linger waits for: whatever may still come, or only records known to be in the topics",
    )
    cost: Literal["rows", "elements", "bytes"] = Field(
        "rows", description="what a request weighs against max_batch_cost"
    )
    max_batch_cost: int | None = Field(None, ge=1, description="most cost of a batch, padded; default no bound")
    max_batch_bytes: int = Field(
        67_108_864, ge=1024, description="most bytes of a batch's inputs; sizes the staging slots"
    )
    allowed_batch_sizes: Sizes = Field(
        (), description="rows that the model may run with, increasing: others are padded up; default any"
    )
    padding: Literal["min_cost", "pad_up", "batch_down"] = Field(
        "min_cost",
        description="between two allowed sizes: the cheaper by the measured curve, the larger with repeated rows, or "
        "the smaller, leaving the rest",
    )
    shape_buckets: Sizes = Field(
        (),
        description="lengths that dimensions with a pad value are padded to, increasing; beyond the last, and by "
        "default, requests of like lengths go together, padded to the longest",
    )
    target_latency_ms: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="batches grow only as far as the measured curve keeps this"
    )
    default_timeout_ms: int = Field(
        0, ge=0, description="deadline of a request that names none, from its record's timestamp; 0: none"
    )
    tenant_header: str | None = Field(
        None, min_length=1, description="record header that names a tenant; the model's time is shared between tenants"
    )
    max_queue_size: int | None = Field(None, ge=1, description="requests that wait or run; default 8 × max_batch_size")
    max_queue_bytes: int = Field(67_108_864, ge=1024, description="most bytes of records held before no more are read")
    priority_aging_ms: int = Field(1_000, ge=1, description="a waiting request rises one priority level per this")

    @model_validator(mode="after")
    def _linger_waits(self) -> Batch:
        if self.dispatch == "linger" and self.max_wait_ms == 0:
            raise ValueError("dispatch linger needs max_wait_ms above 0; use dispatch eager to never wait")
        if self.dispatch == "defer" and self.default_timeout_ms == 0:
            raise ValueError("dispatch defer waits for deadlines: set default_timeout_ms for requests that name none")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Batch:
        for name in ("allowed_batch_sizes", "shape_buckets"):
            sizes = getattr(self, name)
            if any(size < 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} must be whole numbers from 1, each larger than the one before")
        if self.allowed_batch_sizes and self.allowed_batch_sizes[-1] > self.max_batch_size:
            raise ValueError(
                f"allowed_batch_sizes goes up to {self.allowed_batch_sizes[-1]}, above max_batch_size "
                f"{self.max_batch_size}: raise max_batch_size or remove the larger sizes"
            )
        return self

    @property
    def minds_backlog(self) -> bool:
        """Whether it matters for cutting a batch that more records are known to be in the topics."""
        return bool(self.allowed_batch_sizes) or self.linger_for == "backlog"

    @property
    def queue_size(self) -> int:
        """Requests that may wait or be in flight before partitions are paused."""
        return self.max_queue_size or 8 * self.max_batch_size


class Limits(Section):
    """What one request may be; a larger one gets `too_large` or `invalid_payload` before it costs anything."""

    max_request_bytes: int = Field(33_554_432, ge=64, description="of a record's value")
    max_headers: int = Field(64, ge=8, description="of a record")
    max_header_bytes: int = Field(16_384, ge=256, description="of all headers of a record together")


class ModelSettings(Section):
    """Which model to serve and how to make it."""

    name: str = Field("model", description="as requests and results name it")
    version: str = Field("1", description="as requests and results name it")
    factory: str | None = Field(None, description="package.module:Class, or a function that returns the model")
    path: Path | None = Field(
        None, description="a .pt2 (torch.export, AOTInductor) or TorchScript .pt file, in place of factory"
    )
    weights: Path | None = Field(None, description="a .safetensors file for the factory's model")
    options: Mapping[str, Any] = Field(default_factory=dict, description="keyword arguments of the factory")

    @model_validator(mode="after")
    def _one_source(self) -> ModelSettings:
        if self.factory is None and self.path is None:
            raise ValueError("set factory (package.module:Class) or path (.pt2 or TorchScript .pt)")
        if self.factory is not None and self.path is not None:
            raise ValueError("factory and path exclude each other: remove one")
        if self.factory is not None and ":" not in self.factory:
            raise ValueError(f"factory {self.factory!r} must read package.module:Class")
        return self


class Inference(Section):
    """Where and how the model runs."""

    device: str = Field(
        "auto", description="auto, cpu, cuda or cuda:N; fake:N?… is an accelerator made of software, for tests"
    )
    replicas: int = Field(1, ge=1, description="copies of the model that run side by side")
    executor: Literal["process", "thread", "inline"] = Field(
        "process", description="process: can be killed and restarted; thread: shares weights; inline: for tests"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="what the model computes in")
    compile: Literal["none", "inductor"] = Field("none", description="inductor: torch.compile before the first request")
    memory_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a device's memory that this worker may take, divided among its replicas; default all",
    )
    self_check: bool = Field(
        True,
        description="at the start, compare a few rows alone, in a batch and padded, and refuse a model that mixes them",
    )
    execution_timeout_ms: int = Field(
        30_000, ge=1, description="a batch that runs longer is a hang: the replica is restarted"
    )
    start_timeout_ms: int = Field(300_000, ge=1_000, description="to load and warm up a replica")
    prepare_workers: int = Field(
        0, ge=0, description="processes per model that run prepare() before batching; 0: the replica runs it"
    )
    threads: int | None = Field(None, ge=1, description="of a CPU replica; default torch's; 1 where cores are shared")
    max_restarts: int = Field(5, ge=0, description="replica restarts within ten minutes before exit 75")


class Ops(Section):
    """The HTTP port and the log."""

    host: str = Field(
        "127.0.0.1", description="address of the HTTP port for metrics and health; it has no authentication"
    )
    port: int = Field(8080, ge=0, le=65_535, description="0 takes a free port and logs it")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto: console on a terminal, JSON elsewhere"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is written")
