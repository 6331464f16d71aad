"""`forebay plan --plot` draws: matplotlib takes longer to import than all else that the command does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.test_cli_plan import curve_file, plan

__all__ = ["curve_file", "plan"]


def test_the_picture_is_drawn(plan: Callable[..., tuple[str, int]], curve_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "p.png"
    plan("--rate", "800", "--requests", "300", "--curve", str(curve_file), "--plot", str(file), "--json")
    assert file.read_bytes().startswith(b"\x89PNG")
