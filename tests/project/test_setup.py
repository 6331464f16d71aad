"""`make setup` on a machine that lacks something says what to install, in one sentence, and leaves nothing behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.markdown import ROOT

TOOLS = ("bash", "dirname", "sed", "cut", "env")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the set-up program, on a machine whose PATH is the folder `path` with the bare tools."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup", tmp_path / "tools")
    (tmp_path / "requirements.lock").touch()
    (tmp_path / "path").mkdir()
    for tool in TOOLS:
        (tmp_path / "path" / tool).symlink_to(shutil.which(tool) or tool)
    return tmp_path


def add_python(checkout: Path, name: str, script: str) -> None:
    program = checkout / "path" / name
    program.write_text(f"#!{shutil.which('bash')}\n{script}\n")
    program.chmod(0o755)


def setup(checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "tools" / "setup"],
        env={"PATH": str(checkout / "path")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_a_new_enough_python_it_names_the_versions_it_looked_for(checkout: Path) -> None:
    add_python(checkout, "python3", "exit 1  # too old: refuses the check of its version")
    done = setup(checkout)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no Python 3.11 or newer" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_python_that_cannot_start_is_passed_over_for_the_next(checkout: Path) -> None:
    add_python(checkout, "python3.11", "exit 127  # as a version manager's shim for a version that is not chosen")
    add_python(checkout, "python3", f'case "$2" in *ensurepip*) exit 1 ;; esac; exec {sys.executable} "$@"')
    assert "python3 cannot make virtual environments" in setup(checkout).stderr


def test_a_debian_python_without_venv_gets_the_name_of_the_package(checkout: Path) -> None:
    add_python(checkout, "python3", f'case "$2" in *ensurepip*) exit 1 ;; esac; exec {sys.executable} "$@"')
    done = setup(checkout)
    assert done.returncode == 1
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"apt install python{version}-venv" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (checkout / ".venv").exists()
