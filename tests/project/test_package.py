"""What is shipped: the sdist and the wheel build, and the wheel works in clean environments, with and without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.project.markdown import ROOT

pytestmark = pytest.mark.slow

UV = Path(sys.executable).with_name("uv")
IMPORT_EVERY_MODULE = """
import importlib, pkgutil, {package} as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(package.__name__, "whole")
"""


def run(*words: str | Path, cwd: Path | None = None, expected: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command outside this checkout and its settings, and show what it said when it ends in an unexpected way."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("FOREBAY_")
    }
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == expected, f"{words} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def make_environment(folder: Path, *requirements: str | Path) -> Path:
    """Make a virtual environment with the locked versions of the requirements; return its bin folder."""
    run(UV, "venv", "--quiet", "--python", sys.executable, folder)
    bin_folder = folder / "bin"
    install = [
        UV,
        "pip",
        "install",
        "--quiet",
        "--python",
        bin_folder / "python",
        "--constraint",
        ROOT / "requirements.lock",
    ]
    cached = subprocess.run([*map(str, [*install, "--offline", *requirements])], capture_output=True, check=False)
    if cached.returncode != 0:
        run(*install, *requirements)
    return bin_folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and its plain dependencies."""
    return make_environment(tmp_path_factory.mktemp("plain") / "venv", wheel)


def test_the_wheel_holds_both_packages_the_examples_and_the_type_marks_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    shipped = {
        f"{target}/{file.relative_to(ROOT / source)}"
        for source, target in (
            ("worker/forebay", "forebay"),
            ("schemas/forebay_schemas", "forebay_schemas"),
            ("examples", "forebay/examples"),
        )
        for file in (ROOT / source).rglob("*.py")
    }
    assert any(name.startswith("forebay/examples/") for name in shipped)
    assert shipped | {"forebay/py.typed", "forebay_schemas/py.typed"} <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"forebay", "forebay_schemas"}
    assert not [name for name in names if "__pycache__" in name]


def test_the_sdist_holds_what_make_test_needs(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    wanted = {"Makefile", "requirements.lock", "pyproject.toml", "tools/setup", ".ci/run", "LICENSE", "README.md"}
    tests = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("*.py")}
    assert wanted | tests <= names


def test_the_wheel_imports_in_a_clean_environment_without_torch(plain: Path, tmp_path: Path) -> None:
    code = "import forebay, forebay_schemas; from forebay import Model; print(forebay.__file__, forebay.__version__)"
    answer = run(plain / "python", "-c", code, cwd=tmp_path).stdout
    assert str(plain.parent) in answer
    assert answer.split()[-1] in next(iter(plain.parent.rglob("forebay-*.dist-info"))).name
    run(plain / "python", "-c", "import torch", cwd=tmp_path, expected=1)


@pytest.mark.parametrize("words", [("forebay",), ("python", "-m", "forebay")], ids=" ".join)
def test_the_command_answers_in_a_clean_environment(plain: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    answer = run(plain / words[0], *words[1:], "--help", cwd=tmp_path).stdout
    assert "Usage" in answer
    assert " run " in answer


def test_a_wrong_command_line_gets_one_sentence_and_exit_code_2_in_a_clean_environment(
    plain: Path, tmp_path: Path
) -> None:
    answer = run(plain / "forebay", "no-such-command", cwd=tmp_path, expected=2)
    assert "no-such-command" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_the_schemas_import_where_pydantic_is_all_there_is(wheel: Path, tmp_path: Path) -> None:
    folder = make_environment(tmp_path / "venv", "pydantic")
    run(UV, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", folder / "python", wheel)
    code = IMPORT_EVERY_MODULE.format(package="forebay_schemas")
    assert "whole" in run(folder / "python", "-c", code, cwd=tmp_path).stdout
