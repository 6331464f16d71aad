"""The repository keeps its own rules: sizes, docstrings, source roots, the lock, no addresses and no strange paths."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.project.markdown import ROOT

MODULES = sorted([*(ROOT / "worker").rglob("*.py"), *(ROOT / "schemas").rglob("*.py")])
MODULE_LIMIT = 300
RECORD_LIMIT = 40
# Written so that this file does not match itself.
REGISTRY = re.compile(
    "py"
    r"pi\.org|python"
    r"hosted|maven"
    r"\.org|maven\.apache|npm"
    r"js\.org|proxy\.go"
    r"lang|crates"
    r"\.io|deb\.debian"
)
ONE_MACHINE = re.compile(r"(^|[^A-Za-z0-9_.])/(work|farm|root|Users|home/[a-z]+)/", re.MULTILINE)


def _files() -> list[Path]:
    """Every file that is in the repository or would be added to it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so nothing says which files belong to it")
    return [path for path in (ROOT / name for name in listed.stdout.splitlines()) if path.is_file()]


def _matches(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in _files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in pattern.finditer(text)]
    return found


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_file_names_the_host_of_a_package_registry() -> None:
    assert _matches(REGISTRY) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    assert _matches(ONE_MACHINE) == []


@pytest.mark.parametrize("module", MODULES, ids=_relative)
def test_every_module_opens_with_a_docstring_and_stays_readable_in_one_sitting(module: Path) -> None:
    text = module.read_text()
    assert ast.get_docstring(ast.parse(text)), "it has no docstring"
    lines = text.count("\n")
    assert lines <= MODULE_LIMIT, f"it has more than {MODULE_LIMIT} lines: split it"


def test_the_source_roots_are_no_packages() -> None:
    assert not (ROOT / "worker" / "__init__.py").exists()
    assert not (ROOT / "schemas" / "__init__.py").exists()


def test_every_decision_record_is_short_and_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    records = [path for path in folder.glob("*.md") if path.name != "README.md"]
    assert [path.name for path in records if f"({path.name})" not in index] == []
    assert [path.name for path in records if len(path.read_text().splitlines()) > RECORD_LIMIT] == []


def test_every_program_of_the_repository_can_be_run_and_parsed() -> None:
    for path in (ROOT / ".ci" / "run", ROOT / "tools" / "setup"):
        assert path.stat().st_mode & 0o111, f"{path.name} is not executable"
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


def _imported(module: Path) -> set[str]:
    """The top-level names that a module imports anywhere, also inside its functions."""
    nodes = list(ast.walk(ast.parse(module.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.split(".")[0] for name in plain | named}


def _declared() -> list[Requirement]:
    """Every requirement of the project, those of its extras too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    return [requirement for requirement in map(Requirement, texts) if requirement.name != project["name"]]


def test_everything_that_the_code_imports_is_a_declared_dependency() -> None:
    own = {"forebay", "forebay_schemas", "examples", *sys.stdlib_module_names}
    declared = {canonicalize_name(requirement.name) for requirement in _declared()}
    sources = packages_distributions()
    undeclared = [
        f"{_relative(module)} imports {name}"
        for module in [*MODULES, *sorted((ROOT / "examples").rglob("*.py"))]
        for name in sorted(_imported(module) - own)
        if not declared & {canonicalize_name(source) for source in sources.get(name, [name])}
    ]
    assert undeclared == []


def test_no_unit_test_imports_torch_so_that_they_take_seconds() -> None:
    torchy = re.compile(r"^\s*(?:import|from) (?:torch|tests\.(?:models|contenders|inference))\b", re.MULTILINE)
    found = [_relative(path) for path in (ROOT / "tests" / "unit").glob("*.py") if torchy.search(path.read_text())]
    assert found == [], "they belong into tests/inference"


def _locked() -> dict[str, list[str]]:
    pins: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==([^ ;\\]+)", (ROOT / "requirements.lock").read_text(), re.M):
        pins.setdefault(canonicalize_name(name), []).append(version)
    return pins


def test_the_lock_pins_everything_that_the_project_asks_for() -> None:
    pins = _locked()
    missing = [
        str(requirement)
        for requirement in _declared()
        if not any(map(requirement.specifier.contains, pins.get(canonicalize_name(requirement.name), [])))
    ]
    assert missing == [], "run: make lock"


def test_the_lock_has_hashes_and_no_addresses() -> None:
    text = (ROOT / "requirements.lock").read_text()
    entries = re.findall(r"^\S+==.*?(?=^\S+==|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(entries) == sum(map(len, _locked().values()))
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert not re.search(r"https?:|://|--index|--find-links|file:|@", text)
