"""Where each setting's value comes from, and how to show one without telling a secret; for `forebay config`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from forebay.settings import ENV_PREFIX, Settings, known_keys, layers

MASK = "**********"
_SECRET_WORDS = (
    "password",
    "secret",
    "token",
    "pem",
    "credential",
    "api_key",
    "api-key",
    "apikey",
    "oauthbearer.config",
)


@dataclass(frozen=True, slots=True)
class Value:
    """One setting: its dotted key, its value ready to print, and where that comes from."""

    key: str
    value: Any
    origin: str


def explain(settings: Settings, path: Path | None, overrides: Iterable[str]) -> list[Value]:
    """Give every setting with its origin; `overrides` are the dotted keys that the command line set."""
    sources = layers(path, dict.fromkeys(overrides, True))
    found = []
    for key in _shown_keys(settings):
        origin = next((name for name, layer in reversed(sources) if _has(layer, key)), "default")
        found.append(
            Value(key, masked(key, _get(settings, key)), _variable(key) if origin == "environment" else origin)
        )
    return found


def masked(key: str, value: Any) -> Any:
    """Give a value as plain JSON types, with every secret in it replaced by asterisks."""
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, BaseModel):
        return {name: masked(name, getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {name: masked(str(name), content) for name, content in value.items()}
    if value is not None and any(word in key.rpartition("kafka.client.")[2].lower() for word in _SECRET_WORDS):
        return MASK
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, Sequence):
        return [masked(key, content) for content in value]
    return str(value)


def nested(settings: Settings) -> dict[str, Any]:
    """Give all settings as plain nested values, secrets masked; leaves out the model section that is not used."""
    shown: dict[str, Any] = masked("", settings)
    shown.pop("models" if not settings.models else "model")
    return shown


def _shown_keys(settings: Settings) -> list[str]:
    keys = [key for key in known_keys() if not key.startswith(("models.", "model."))]
    if settings.model is not None:
        return keys + [key for key in known_keys() if key.startswith("model.")]
    return [*keys, "models"]


def _get(settings: Settings, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _has(layer: Mapping[str, Any], key: str) -> bool:
    value: Any = layer
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return False
        found = next((name for name in value if str(name).lower() == part), None)
        if found is None:
            return False
        value = value[found]
    return True


def _variable(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", "__")
