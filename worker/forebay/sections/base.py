"""What every section of the settings shares. Edge code: pydantic is welcome here and nowhere on the hot path."""

from __future__ import annotations

from typing import Annotated

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict
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
