"""`forebay check`: everything that a first start could trip over, each with its fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
) -> Iterator[Finding]:
    """Ask every question, one after the other; one that fails never keeps the next ones from being asked."""
    from forebay.cli.check_kafka import check_kafka
    from forebay.cli.check_machine import check_machine
    from forebay.cli.findings import ok

    models = ", ".join(f"{model.name}:{model.version}" for model in settings.served) or "no model"
    yield ok("settings", f"valid; {models}, {settings.delivery.guarantee}, {settings.batch.dispatch}")
    yield from check_kafka(settings, topics_command)
    yield from check_machine(settings, search, load=load)


def _names(settings: Settings) -> list[str]:
    """Give the longest names of questions: a line is printed before it is known what the later ones are about."""
    kafka = settings.kafka
    topics = [f"topic {name}" for name in (*kafka.input_topics, kafka.output_topic, kafka.dead_letter_topic)]
    return [*topics, f"group {kafka.group_id}", *(f"model {model.name}" for model in settings.served)]


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
    from forebay.mistakes import SettingsError

    findings: Iterable[Finding]
    try:
        settings = read_settings(config, values, {"kafka.bootstrap_servers": bootstrap})
    except ConfigError as error:
        wrong = error.mistakes if isinstance(error, SettingsError) else [str(error)]
        mend = "mend the configuration; forebay config schema tells every key"
        findings = [failed("settings", one, mend if one is wrong[-1] else None) for one in wrong]
        names = ["settings"]
    else:
        search = [Path.cwd(), *([config.resolve().parent] if config is not None else [])]
        findings = examine(settings, search, load=load, topics_command=topics_command(config, bootstrap, values))
        names = _names(settings)
    if not json:
        return exit_code(print_findings(findings, names))
    found = list(findings)
    typer.echo(orjson.dumps(as_json(found), option=orjson.OPT_INDENT_2).decode())
    return exit_code(found)
