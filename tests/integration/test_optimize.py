"""`forebay optimize` with the processes in which it measures."""

from __future__ import annotations

from typing import Any

import orjson
from typer.testing import CliRunner

from forebay.cli.app import app

FACTORY = "tests.unit.test_precision:Net"


def invoke(*arguments: str) -> Any:
    settings = (f"model.factory={FACTORY}", "inference.threads=1", "kafka.bootstrap_servers=localhost:1")
    return CliRunner().invoke(app, ["optimize", *arguments, *(part for one in settings for part in ("--set", one))])


def test_the_command_measures_in_processes_and_says_what_to_set() -> None:
    done = invoke("--json", "--precision", "fp32,tf32", "--compile", "none", "--sparsity", "none")
    assert done.exit_code == 0, done.output
    told = orjson.loads(done.stdout)
    assert [(one["precision"], one["verdict"][:8]) for one in told["candidates"]] == [
        ("fp32", "adopted"), ("tf32", "not here"),
    ]  # fmt: skip
    assert told["candidates"][0]["speedup"] == 1.0
    assert told["candidates"][0]["deviation"] == 0.0
    assert told["adopted"] == {"precision": "fp32", "compile": "none"}
    assert told["settings"] == "inference:\n  precision: fp32\n  compile: none\n"
    assert told["device"] == "cpu"
