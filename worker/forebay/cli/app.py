"""The command line: one module per command, each with `register(app)`; heavy imports stay inside the commands.

Every error of ours ends as one sentence on standard error and the exit code of its class; a traceback is a bug.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module

import typer

from forebay import __version__
from forebay.errors import EXIT_USAGE, ForebayError

COMMANDS = (
    "run",
    "check",
    "topics",
    "send",
    "results",
    "request",
    "dlq",
    "top",
    "bench",
    "plan",
    "optimize",
    "config",
    "acls",
    "asyncapi",
    "broker",
    "demo",
)
"""The modules of `forebay.cli` that register commands, in the order of the help page."""

app = typer.Typer(
    name="forebay",
    help="A Kafka consumer for batched PyTorch inference: one answer per request, offsets committed after it is safe.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"forebay {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Hold the options that every command shares."""


def _unwrap(group: typer.Typer) -> None:
    """Join the lines of each paragraph of help: typer keeps those of the docstring, which no terminal fits."""
    for command in group.registered_commands:
        paragraphs = inspect.cleandoc(command.help or command.callback.__doc__ or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _unwrap(inner.typer_instance)


for _name in COMMANDS:
    import_module(f"forebay.cli.{_name}").register(app)
_unwrap(app)


def main() -> None:
    """Run the command and exit with the code of the contract."""
    try:
        code = app(standalone_mode=False)
    except ForebayError as error:
        typer.secho(f"forebay: {error}", err=True, fg="red")
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(130)
    except typer.TyperException as error:  # typer brings its own click since 0.25; the real one never reaches here
        show = getattr(error, "show", None)
        if show is None:
            typer.secho(f"Error: {error}", err=True)
        else:
            show()
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)
