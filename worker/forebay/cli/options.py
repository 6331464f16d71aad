"""Options that several commands share, and how they become settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from forebay.errors import UsageError
from forebay.settings import Settings, load

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The worker's YAML file.", envvar="FOREBAY_CONFIG", show_default=False),
]
SetValues = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Any setting, e.g. batch.max_batch_size=64.",
        show_default=False,
    ),
]
Bootstrap = Annotated[
    str | None,
    typer.Option("--bootstrap-servers", "-b", help="Overrides kafka.bootstrap_servers.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def read_settings(
    config: Path | None, values: Sequence[str] | None, named: Mapping[str, Any] | None = None
) -> Settings:
    """Read the settings with the command line's values on top.

    `named` holds dedicated options (`kafka.bootstrap_servers`); None means that the option was not given.
    """
    overrides: dict[str, Any] = {}
    for text in values or ():
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise UsageError(f"--set takes KEY=VALUE, not {text!r}")
        try:
            overrides[key.strip()] = yaml.safe_load(value) if value else value
        except yaml.YAMLError as error:
            raise UsageError(f"--set {key}: the value is not valid YAML") from error
    overrides |= {key: value for key, value in (named or {}).items() if value is not None}
    return load(config, overrides)
