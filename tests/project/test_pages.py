"""What README, CONTRIBUTING and docs tell a reader to type exists, and their settings and model classes are valid."""

from __future__ import annotations

import ast
import os
import re
import sys
import types
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from forebay import Model, TensorSpec
from forebay.cli import app
from forebay.settings import Settings, load
from tests.project.markdown import ROOT, Block, blocks, commands, shell_blocks

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
MAKE_OPTIONS_WITH_VALUE = {"-C", "-j", "-f"}


def _settings_blocks() -> list[Block]:
    """The YAML blocks with a section of the settings; others configure other programs."""
    return [
        block
        for block in blocks("yaml", "yml")
        if block.page == "README.md" or Settings.model_fields.keys() & set(yaml.safe_load(block.text) or ())
    ]


def _model_classes(block: Block) -> list[str]:
    classes = (node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.ClassDef))
    return [node.name for node in classes if any(getattr(base, "id", "") == "Model" for base in node.bases)]


def _check_make(words: list[str]) -> None:
    arguments = iter(words[1:])
    for word in arguments:
        if word in MAKE_OPTIONS_WITH_VALUE:
            next(arguments, None)
        elif not word.startswith("-") and "=" not in word:
            assert word in TARGETS, f"the Makefile has no target {word}"


def _check_forebay(words: list[str]) -> None:
    command = get_command(app)
    options = {name for option in command.params for name in option.opts}
    for word in words[1:]:
        inner = getattr(command, "commands", {})
        if word.startswith("-") and word != "-":
            assert word.split("=")[0] in options | {"--help", "-h"}, f"{' '.join(words)}: no option {word}"
        elif inner:
            assert word in inner, f"{' '.join(words)}: no command {word}, only {', '.join(inner)}"
            command = inner[word]
            options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("block", shell_blocks(), ids=str)
def test_every_make_target_and_forebay_option_that_a_page_names_exists(block: Block) -> None:
    for words in commands(block):
        program = Path(words[0]).name
        if program == "make":
            _check_make(words)
        elif program == "forebay":
            _check_forebay(words)


def test_the_readme_shows_the_two_commands_that_start_everything() -> None:
    typed = {" ".join(words) for block in shell_blocks() if block.page == "README.md" for words in commands(block)}
    assert {"make demo", "make test"} <= typed


@pytest.mark.parametrize("block", _settings_blocks(), ids=str)
def test_every_settings_block_of_a_page_is_a_valid_configuration(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "worker.yaml"
    file.write_text(block.text)
    assert isinstance(load(file), Settings)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_every_python_block_of_a_page_compiles_and_its_imports_exist(block: Block) -> None:
    tree = ast.parse(block.text, str(block))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    module = types.ModuleType("page")
    exec(compile(ast.Module(imports, []), str(block), "exec"), module.__dict__)  # noqa: S102 the project's own page
    compile(tree, str(block), "exec")
    assert all(name.asname or name.name.split(".")[0] in vars(module) for node in imports for name in node.names)


@pytest.mark.parametrize("block", [block for block in blocks("python") if _model_classes(block)], ids=str)
def test_every_model_class_of_a_page_can_be_defined_as_it_stands(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    exec(compile(block.text, str(block), "exec"), module.__dict__)  # noqa: S102 the project's own page
    for name in _model_classes(block):
        model = getattr(module, name)
        assert issubclass(model, Model)
        assert model.inputs
        assert model.outputs
        assert all(isinstance(spec, TensorSpec) for spec in (*model.inputs, *model.outputs))


def test_the_readme_shows_a_model_class_of_at_most_twelve_lines() -> None:
    models = [block for block in blocks("python") if block.page == "README.md" and _model_classes(block)]
    assert models, "the README shows no model class"
    assert all(_lines_of_class(block) <= 12 for block in models)


def _lines_of_class(block: Block) -> int:
    classes = [node for node in ast.parse(block.text).body if isinstance(node, ast.ClassDef)]
    lines = block.text.splitlines()
    return max(sum(1 for line in lines[node.lineno - 1 : node.end_lineno] if line.strip()) for node in classes)
