"""Every setting of a worker: frozen sections, read once at start, passed on section by section.

Precedence: command line > environment > secret files > YAML > default. An unknown key is refused with the
nearest known one. Edge code: pydantic is welcome here and nowhere on the hot path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from forebay.errors import ConfigError
from forebay.mistakes import SettingsError, nearest_variable, sentences
from forebay.sections.base import Section
from forebay.sections.batch import Batch, Limits
from forebay.sections.delivery import Delivery
from forebay.sections.inference import Inference, ModelSettings
from forebay.sections.kafka import Kafka, Security, Tls
from forebay.sections.ops import Ops

__all__ = [
    "ENV_PREFIX",
    "Batch",
    "Delivery",
    "Inference",
    "Kafka",
    "Limits",
    "ModelSettings",
    "Ops",
    "Section",
    "Security",
    "Settings",
    "Tls",
    "known_keys",
    "load",
]

ENV_PREFIX = "FOREBAY_"
_NOT_SETTINGS = {"FOREBAY_FAILPOINTS", "FOREBAY_SECRETS_DIR", "FOREBAY_CONFIG"}


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
        names = [model.name for model in self.models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"models: two entries have the name {twice[0]!r}, and a worker serves one version of a model: give "
                "them names of their own, or run a worker for each version"
            )
        return self

    @model_validator(mode="after")
    def _share_group_fits(self) -> Settings:
        if not self.delivery.share_group:
            return self
        if self.kafka.group_protocol != "classic":
            raise ValueError(
                f"kafka.group_protocol {self.kafka.group_protocol} does not go with delivery.share_group, which has a "
                "protocol of its own: remove one of them"
            )
        if self.kafka.auto_offset_reset == "error":
            raise ValueError("kafka.auto_offset_reset error does not go with delivery.share_group: use earliest")
        if self.batch.linger_for == "backlog":
            raise ValueError(
                "batch.linger_for backlog does not go with delivery.share_group, where nobody knows how much is left "
                "to read: use linger_for arrivals"
            )
        return self

    @property
    def served(self) -> tuple[ModelSettings, ...]:
        """The models that this worker serves; the first one is the default."""
        return self.models or ((self.model,) if self.model else ())

    @classmethod
    def settings_customise_sources(  # type: ignore[override]
        cls, settings_cls: Any, init_settings: Any, **_: Any
    ) -> tuple[Any, ...]:
        """Take what `load` merged and nothing else: it has the precedence of the contract."""
        return (init_settings,)


def load(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Read the settings.

    `path` is the YAML file, `overrides` maps dotted keys (`kafka.group_id`) to values of the command line.
    Raises ConfigError with one sentence per mistake.
    """
    merged: dict[str, Any] = {}
    sources = layers(path, overrides)
    for _, layer in sources:
        _merge(merged, layer)
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise SettingsError(sentences(error, known_keys(), lambda key: _origin(sources, key))) from error


def _origin(sources: list[tuple[str, dict[str, Any]]], key: str) -> str:
    """Name what a value comes from where that is neither the file nor the command line, which are in plain sight."""
    layers = dict(sources[1:])
    parts = key.split(".")
    if _has(layers["command line"], parts):
        return ""
    if _has(layers["environment"], parts):
        return f" (from {ENV_PREFIX}{key.upper().replace('.', '__')})"
    return " (from a secret file)" if _has(layers["secret file"], parts) else ""


def _has(layer: Any, parts: list[str]) -> bool:
    for part in parts:
        if not isinstance(layer, Mapping) or part not in layer:
            return False
        layer = layer[part]
    return True


def layers(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Return what each source says, the strongest last: the name of the source and its nested values."""
    return [
        (str(path), _from_yaml(path)),
        ("secret file", _from_secrets()),
        ("environment", _from_environment()),
        ("command line", _from_dotted(overrides or {})),
    ]


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
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}; --config or FOREBAY_CONFIG names the YAML file, "
            "and forebay config show prints one to start from"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"{where} is not valid YAML: {problem}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a mapping of sections (kafka:, batch:, model: …)")
    return {key: value for key, value in content.items() if value is not None}


def _from_environment() -> dict[str, Any]:
    source = EnvSettingsSource(Settings, env_prefix=ENV_PREFIX, env_nested_delimiter="__", case_sensitive=False)
    sections = {name.upper() for name in Settings.model_fields}
    strange = [name for name in _ours() if name.removeprefix(ENV_PREFIX).split("__")[0].upper() not in sections]
    if strange:
        known = _variables()
        told = [f"unknown environment variable {name}{nearest_variable(name, known, ENV_PREFIX)}" for name in strange]
        raise SettingsError(told)
    files = {name.lower() for name in _ours() if _names_a_file(name)}
    source.env_vars = {key: value for key, value in source.env_vars.items() if key not in files}
    try:
        values = source()
    except ValueError as error:
        broken = ", ".join(name for name in _ours() if not _is_readable(source, name))
        raise ConfigError(f"{broken or 'an environment variable'} cannot be read: it must be valid JSON") from error
    return {key: value for key, value in values.items() if value is not None}


def _is_readable(source: EnvSettingsSource, variable: str) -> bool:
    source.env_vars = {variable.lower(): os.environ[variable]}
    try:
        source()
    except ValueError:
        return False
    return True


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
            if not isinstance(section, dict):
                raise ConfigError(f"{dotted} cannot be set beside {parent}, which it is a part of: remove one of them")
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
