"""`forebay plan` with a model: the replica that a worker would start is measured in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.plan_curve import read
from forebay.errors import ConfigError, ForebayError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOREBAY_CONFIG", "FOREBAY_KAFKA__BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name, raising=False)


def plan(*arguments: str) -> str:
    """Run the command in this process; return its standard output."""
    result = CliRunner().invoke(app, ["plan", *arguments], standalone_mode=False)
    if isinstance(result.exception, ForebayError):
        raise result.exception
    assert result.exception is None, result.exception
    return result.stdout


def test_a_model_is_measured_as_the_worker_would_start_it(tmp_path: Path) -> None:
    saved = tmp_path / "curve.json"
    options = ("-s", "model.factory=tests.models:Double", "-s", "model.name=double", "-s", "inference.device=cpu")
    text = plan(
        "--rate", "50", "--requests", "200", "--max-batch-size", "4", "--save-curve", str(saved), "--json", *options
    )
    curve = json.loads(text)["curve"]
    assert curve["model"] == "double"
    assert [point["rows"] for point in curve["points"]] == [1, 2, 4]
    assert all(point["p50_ms"] > 0 for point in curve["points"])
    assert read(saved).largest == 4


def test_a_model_that_does_not_load_ends_the_plan_with_its_reason() -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        plan("--rate", "50", "-s", "model.factory=no_such_module:Nothing")
