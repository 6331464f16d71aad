"""`forebay check`: everything that a first start could trip over, each with its fix."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.options import AsJson, Bootstrap, ConfigFile, SetValues, read_settings

if TYPE_CHECKING:
    from forebay.cli.findings import Finding
    from forebay.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(check)


def examine(
    settings: Settings, search: list[Path], *, load: bool, topics_command: str = "forebay topics"
) -> list[Finding]:
    """Ask every question; a question that fails never keeps the next ones from being asked."""
    from forebay.cli.check_kafka import check_kafka
    from forebay.cli.check_machine import check_machine
    from forebay.cli.findings import ok

    models = ", ".join(f"{model.name}:{model.version}" for model in settings.served) or "no model"
    findings = [ok("settings", f"valid; {models}, {settings.delivery.guarantee}, {settings.batch.dispatch}")]
    findings += check_kafka(settings, topics_command)
    findings += check_machine(settings, search, load=load)
    return findings


def check(
    load: Annotated[
        bool, typer.Option("--load/--no-load", help="Load the model on its device, in a process, and run a few rows.")
    ] = True,
    json: AsJson = False,
    bootstrap: Bootstrap = None,
    config: ConfigFile = None,
    values: SetValues = None,
) -> int:
    """Ask everything that a first start could trip over, and say how to mend it. Changes nothing.

    The model is loaded and tried with a few rows, uncompiled. Exits with 0 if nothing is wrong, 69 if only Kafka is
    not reachable, 78 if something must be mended.
    """
    import orjson

    from forebay.cli.findings import as_json, exit_code, failed, print_findings
    from forebay.cli.topics import topics_command
    from forebay.errors import ConfigError

    try:
        settings = read_settings(config, values, {"kafka.bootstrap_servers": bootstrap})
    except ConfigError as error:
        findings = [failed("settings", str(error), "mend the configuration; forebay config schema tells every key")]
    else:
        search = [Path.cwd(), *([config.resolve().parent] if config is not None else [])]
        findings = examine(settings, search, load=load, topics_command=topics_command(config, bootstrap, values))
    if json:
        typer.echo(orjson.dumps(as_json(findings), option=orjson.OPT_INDENT_2).decode())
    else:
        print_findings(findings)
    return exit_code(findings)
