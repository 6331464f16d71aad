"""The command line: one module per command, each with `register(app)`; heavy imports stay inside the commands.

Every error of ours ends as one sentence on standard error and the exit code of its class; a traceback is a bug, and
exits with 70.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import traceback
from importlib import import_module

import typer

from forebay import __version__
from forebay.cli.interrupts import come_again, unwinding_at
from forebay.errors import EXIT_INTERNAL, EXIT_USAGE, ForebayError

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
    epilog="First steps, each with --config worker.yaml: forebay topics, check, run; then send, results, top. A Kafka "
    "to try it with: forebay broker --port 9092. All at once: forebay demo.",
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
        with come_again(), unwinding_at([signal.SIGINT]):
            code = app(standalone_mode=False)
    except ForebayError as error:
        _tell(f"forebay: {error}")
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
    except Exception as error:  # the top: what nobody expected still ends with the code that says so
        told = f"internal error, {type(error).__name__}: {error}".rstrip(": ")
        _tell(f"forebay: {told}; this is a bug of Forebay's: please report it with what is above", error)
        sys.exit(EXIT_INTERNAL)
    sys.exit(code if isinstance(code, int) else 0)


def _tell(sentence: str, error: Exception | None = None) -> None:
    """Write the last sentence. Where nobody takes it, the exit code alone has to say what it can."""
    try:
        if error is not None:
            traceback.print_exception(error)
        typer.secho(sentence, err=True, fg="red")
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # else Python, which flushes it at exit, ends with 120
