"""`forebay plan --plot` draws: matplotlib takes longer to import than all else that the command does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.plan_curve import save
from forebay.errors import ForebayError
from tests.unit.test_cli_plan import CURVE


@pytest.fixture
def curve_file(tmp_path: Path) -> Path:
    save(CURVE, tmp_path / "curve.json")
    return tmp_path / "curve.json"


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, int]]:
    """Run the command in this process; returns its standard output and its exit code."""
    for name in ("FOREBAY_CONFIG", "FOREBAY_KAFKA__BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> tuple[str, int]:
        result = CliRunner().invoke(app, ["plan", *arguments], standalone_mode=False)
        if isinstance(result.exception, ForebayError):
            raise result.exception
        assert result.exception is None, result.exception
        return result.stdout, result.return_value

    return run


def test_the_picture_is_drawn(plan: Callable[..., tuple[str, int]], curve_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "p.png"
    plan("--rate", "800", "--requests", "300", "--curve", str(curve_file), "--plot", str(file), "--json")
    assert file.read_bytes().startswith(b"\x89PNG")
