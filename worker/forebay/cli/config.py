"""`forebay config`: show the settings as a worker would read them, or their JSON Schema."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from forebay.cli.options import AsJson, Bootstrap, ConfigFile, SetValues, read_settings


def schema_document() -> dict[str, Any]:
    """Give the JSON Schema of `worker.yaml`."""
    from forebay.settings import Settings

    document = Settings.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document, "title": "Forebay worker settings"}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Show the settings, or their JSON Schema.", no_args_is_help=True)
    group.command("show")(show)
    group.command("schema")(schema)
    app.add_typer(group, name="config")


def show(
    explain: Annotated[bool, typer.Option("--explain", help="Say where each value comes from.")] = False,
    json: AsJson = False,
    bootstrap: Bootstrap = None,
    config: ConfigFile = None,
    values: SetValues = None,
) -> None:
    """Show the settings as a worker would read them, secrets masked: YAML that could be a worker.yaml."""
    import orjson
    import yaml

    from forebay.cli import origins
    from forebay.stream.client_config import consumer_config, producer_config

    settings = read_settings(config, values, {"kafka.bootstrap_servers": bootstrap})
    consumer_config(settings.kafka, settings.batch)  # refuses what a worker would refuse in kafka.client
    producer_config(settings.kafka, settings.delivery)
    if not explain:
        shown = origins.nested(settings)
        text = orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode() if json else None
        typer.echo(text or yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).rstrip())
        return
    overrides = [text.partition("=")[0].strip() for text in values or ()]
    overrides += ["kafka.bootstrap_servers"] if bootstrap else []
    found = origins.explain(settings, config, overrides)
    if json:
        told = {one.key: {"value": one.value, "origin": one.origin} for one in found}
        typer.echo(orjson.dumps(told, option=orjson.OPT_INDENT_2).decode())
        return
    _print(found)


def schema() -> None:
    """Print the JSON Schema of worker.yaml, for editors: `# yaml-language-server: $schema=worker.schema.json`."""
    import orjson

    typer.echo(orjson.dumps(schema_document(), option=orjson.OPT_INDENT_2).decode())


def _print(found: list[Any]) -> None:
    import orjson
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None)
    for heading in ("setting", "value", "from"):
        table.add_column(heading, overflow="fold")
    for one in found:
        style = "dim" if one.origin == "default" else ""
        value = one.value if isinstance(one.value, str) else orjson.dumps(one.value).decode()
        table.add_row(Text(one.key, style), Text(value, style), Text(one.origin, style))
    Console(highlight=False).print(table)
