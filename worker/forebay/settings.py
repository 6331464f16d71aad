"""Every setting of a worker: frozen sections, read once at start, passed on section by section.

Precedence: command line > environment > secret files > YAML > default. An unknown key is refused with the
nearest known one. Edge code: pydantic is welcome here and nowhere on the hot path.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict

from forebay.errors import ConfigError

ENV_PREFIX = "FOREBAY_"
_NOT_SETTINGS = {"FOREBAY_FAILPOINTS", "FOREBAY_SECRETS_DIR", "FOREBAY_CONFIG"}


def _split(value: object) -> object:
    """Accept `a,b` and a YAML list where a list is wanted, so that an environment variable needs no JSON."""
    if isinstance(value, str):
        parsed = yaml.safe_load(value) if value.startswith("[") else value.split(",")
        return [str(part).strip() for part in parsed]
    return value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class Section(BaseModel):
    """The base of every section: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Tls(Section):
    """TLS files, PEM. The peer's certificate and name are verified unless `verify` is false."""

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    key_password: SecretStr | None = None
    verify: bool = True


class Security(Section):
    """How to reach a protected cluster."""

    protocol: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = "plaintext"
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = None
    username: str | None = None
    password: SecretStr | None = None
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

    bootstrap_servers: str = "localhost:9092"
    input_topics: Names = ("inference.requests",)
    output_topic: str = "inference.results"
    dead_letter_topic: str = "inference.dead-letters"
    group_id: str = "forebay"
    reply_topics: Names = ()
    auto_offset_reset: Literal["earliest", "latest", "error"] = "earliest"
    group_protocol: Literal["classic", "consumer"] = "classic"
    security: Security = Security()
    client: Mapping[str, str | int | float | bool] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _topics_differ(self) -> Kafka:
        if not self.input_topics or not all(self.input_topics):
            raise ValueError("input_topics must name at least one topic")
        for name in ("output_topic", "dead_letter_topic"):
            if getattr(self, name) in self.input_topics:
                raise ValueError(f"{name} is also an input topic: the worker would feed itself for ever")
        return self


class Delivery(Section):
    """What is promised about outcomes, and how long endings may take."""

    guarantee: Literal["at_least_once", "exactly_once"] = "at_least_once"
    ordering: Literal["none", "partition", "key"] = "none"
    max_attempts: int = Field(3, ge=1)
    drain_timeout_ms: int = Field(25_000, ge=0)
    revoke_timeout_ms: int = Field(5_000, ge=0, description="how long a revoked partition may hold up the group")
    commit_interval_ms: int = Field(200, ge=1)
    transactional_id: str | None = Field(
        None, description="exactly_once: stable and unique per worker; default GROUP-HOSTNAME"
    )
    transaction_timeout_ms: int = Field(10_000, ge=1_000)


class Batch(Section):
    """The bounds of a micro-batch, and of what waits in front of it."""

    max_batch_size: int = Field(32, ge=1, description="rows")
    max_wait_ms: float = Field(5.0, ge=0, description="from the oldest request's arrival; used by linger")
    dispatch: Literal["eager", "linger", "static"] = "eager"
    cost: Literal["rows", "elements", "bytes"] = "rows"
    max_batch_cost: int | None = Field(None, ge=1)
    max_batch_bytes: int = Field(67_108_864, ge=1024)
    max_queue_size: int | None = Field(None, ge=1, description="requests; default 8 batches")
    max_queue_bytes: int = Field(67_108_864, ge=1024)
    priority_aging_ms: int = Field(1_000, ge=1, description="a waiting request rises one priority level per this")

    @model_validator(mode="after")
    def _linger_waits(self) -> Batch:
        if self.dispatch == "linger" and self.max_wait_ms == 0:
            raise ValueError("dispatch linger needs max_wait_ms above 0; use dispatch eager to never wait")
        return self

    @property
    def queue_size(self) -> int:
        """Requests that may wait or be in flight before partitions are paused."""
        return self.max_queue_size or 8 * self.max_batch_size


class Limits(Section):
    """What one request may be; a larger one gets `too_large` or `invalid_payload` before it costs anything."""

    max_request_bytes: int = Field(33_554_432, ge=64)
    max_headers: int = Field(64, ge=8)
    max_header_bytes: int = Field(16_384, ge=256)


class ModelSettings(Section):
    """Which model to serve and how to make it."""

    name: str = "model"
    version: str = "1"
    factory: str | None = None
    path: Path | None = None
    weights: Path | None = None
    options: Mapping[str, Any] = Field(default_factory=dict)

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

    device: str = "auto"
    replicas: int = Field(1, ge=1)
    executor: Literal["process", "thread", "inline"] = "process"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: Literal["none", "inductor"] = "none"
    execution_timeout_ms: int = Field(30_000, ge=1)
    start_timeout_ms: int = Field(300_000, ge=1_000)
    threads: int | None = Field(None, ge=1, description="intra-op threads of a CPU replica; default torch's")
    max_restarts: int = Field(5, ge=0, description="replica restarts within ten minutes before exit 75")


class Ops(Section):
    """The HTTP port and the log."""

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65_535, description="0 takes a free port and logs it")
    log_format: Literal["auto", "json", "console"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Settings(BaseSettings):
    """A worker's settings, whole."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    kafka: Kafka = Kafka()
    delivery: Delivery = Delivery()
    batch: Batch = Batch()
    limits: Limits = Limits()
    model: ModelSettings | None = None
    models: tuple[ModelSettings, ...] = ()
    inference: Inference = Inference()
    ops: Ops = Ops()

    @model_validator(mode="after")
    def _models_agree(self) -> Settings:
        if self.model is not None and self.models:
            raise ValueError("set model or models, not both")
        names = [(model.name, model.version) for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError("models: two entries have the same name and version")
        return self

    @property
    def served(self) -> tuple[ModelSettings, ...]:
        """The models that this worker serves; the first one is the default."""
        return self.models or ((self.model,) if self.model else ())

    @classmethod
    def settings_customise_sources(cls, settings_cls: Any, init_settings: Any, **_: Any) -> tuple[Any, ...]:
        """Take what `load` merged and nothing else: it has the precedence of the contract."""
        return (init_settings,)


def load(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Read the settings.

    `path` is the YAML file, `overrides` maps dotted keys (`kafka.group_id`) to values of the command line.
    Raises ConfigError with one sentence per mistake.
    """
    merged: dict[str, Any] = {}
    for layer in (_from_yaml(path), _from_secrets(), _from_environment(), _from_dotted(overrides or {})):
        _merge(merged, layer)
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentences(error))) from error


def known_keys(model: type[BaseModel] = Settings, prefix: str = "") -> list[str]:
    """Every dotted key that can be set."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        section = next((t for t in _types_in(info.annotation) if issubclass(t, BaseModel)), None)
        keys += known_keys(section, f"{prefix}{name}.") if section else [prefix + name]
    return keys


def _types_in(annotation: object) -> Iterable[type]:
    if isinstance(annotation, type):
        yield annotation
    for part in get_args(annotation):
        yield from _types_in(part)


def _from_yaml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a mapping of sections (kafka:, batch:, model: …)")
    return {key: value for key, value in content.items() if value is not None}


def _from_environment() -> dict[str, Any]:
    source = EnvSettingsSource(Settings, env_prefix=ENV_PREFIX, env_nested_delimiter="__", case_sensitive=False)
    sections = {name.upper() for name in Settings.model_fields}
    for name in _ours():
        section = name.removeprefix(ENV_PREFIX).split("__")[0].upper()
        if section not in sections:
            raise ConfigError(f"unknown environment variable {name}{_nearest(name, _variables())}")
    files = {name.lower() for name in _ours() if _names_a_file(name)}
    source.env_vars = {key: value for key, value in source.env_vars.items() if key not in files}
    try:
        values = source()
    except ValueError as error:
        raise ConfigError(f"an environment variable cannot be read: {error}") from error
    return {key: value for key, value in values.items() if value is not None}


def _from_secrets() -> dict[str, Any]:
    """Read `FOREBAY_SECRETS_DIR/kafka__security__password` and what `FOREBAY_…_FILE` variables name."""
    found: dict[str, Any] = {}
    folder = os.environ.get("FOREBAY_SECRETS_DIR")
    if folder:
        if not Path(folder).is_dir():
            raise ConfigError(f"FOREBAY_SECRETS_DIR names {folder}, which is not a folder")
        for file in Path(folder).iterdir():
            if file.is_file() and "__" in file.name:
                dotted = file.name.lower().removeprefix(ENV_PREFIX.lower()).replace("__", ".")
                _merge(found, _from_dotted({dotted: file.read_text().strip()}))
    for name in filter(_names_a_file, _ours()):
        path = Path(os.environ[name])
        try:
            _merge(found, _from_dotted({_dotted(name).removesuffix("_file"): path.read_text().strip()}))
        except OSError as error:
            raise ConfigError(f"{name} names {path}, which cannot be read: {error.strerror}") from error
    return found


def _ours() -> list[str]:
    return [name for name in os.environ if name.startswith(ENV_PREFIX) and name not in _NOT_SETTINGS]


def _dotted(variable: str) -> str:
    return variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")


def _names_a_file(variable: str) -> bool:
    """Whether a `…_FILE` variable names a file with the value, rather than being a setting of that name."""
    return variable.endswith("_FILE") and _dotted(variable) not in known_keys()


def _variables() -> list[str]:
    return [ENV_PREFIX + key.upper().replace(".", "__") for key in known_keys()]


def _from_dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for dotted, value in values.items():
        *parents, last = dotted.split(".")
        section = nested
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return nested


def _merge(into: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if value is None and isinstance(into.get(key), dict):
            continue  # an empty section, as in `kafka:` with every line commented out
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _sentences(error: ValidationError) -> Iterable[str]:
    for detail in error.errors():
        key = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            yield f"unknown key {key}{_nearest(key, [*Settings.model_fields, *known_keys()])}"
        else:
            message = detail["msg"].removeprefix("Value error, ")
            yield f"{key}: {message}" if key else message
