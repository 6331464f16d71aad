"""`forebay check` of a model that a worker would refuse: the advice goes by the cause."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.check_machine import FIXES
from forebay.cli.model_probe import probe
from tests.unit.test_cli_check import MODEL


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOREBAY_KAFKA__BOOTSTRAP_SERVERS", "FOREBAY_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("source", "factory", "cause"),
    [
        ("class M(:", "broken:M", "syntax"),
        ("import no_such_package_anywhere", "broken:M", "import"),
        ("", "no_such_module_anywhere:M", "factory"),
        ("class N: pass", "broken:M", "factory"),
        ("class M:\n    def __init__(self, a): pass", "broken:M", "options"),
        ("1 / 0", "broken:M", "code"),
        (MODEL + "return x[:, :1]", "broken:M", "code"),
        (MODEL + "return x - x.mean(0)", "broken:M", "code"),
    ],
)
def test_a_model_that_a_worker_would_refuse_is_advised_on_by_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, factory: str, cause: str
) -> None:
    """Asked in this process, to save a start of torch for each; `test_cli_tools` asks a process of its own."""
    pytest.importorskip("torch")
    monkeypatch.setattr(subprocess, "run", _probed_here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    (tmp_path / "broken.py").write_text(source)
    config = tmp_path / "w.yaml"
    config.write_text(f'model: {{name: m, factory: "{factory}"}}\nops: {{port: 0}}\n')
    command = ["check", "--json", "-c", str(config), "-b", "127.0.0.1:1"]
    result = CliRunner().invoke(app, command, standalone_mode=False)
    found = {one["question"]: one for one in json.loads(result.output)["findings"]}["model m"]
    sys.modules.pop("broken", None)
    assert found["fix"] == FIXES[cause].format(name="m"), found


def _probed_here(*_: object, input: bytes, **__: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.CompletedProcess([], 0, json.dumps(probe(input)).encode(), b"")
