"""The reference pages say what the code says."""

from __future__ import annotations

from typer.main import get_command

from forebay.cli import app
from forebay.settings import known_keys
from forebay_schemas.codes import RETRIABLE_CODES, ErrorCode
from tests.project.markdown import ROOT
from tools import commands_reference, metrics_reference, settings_reference


def test_the_settings_page_is_what_the_settings_say() -> None:
    assert settings_reference.PAGE.read_text() == settings_reference.render(), "run: make reference"


def test_every_setting_has_its_row_with_its_variable() -> None:
    rows = [line for line in settings_reference.PAGE.read_text().splitlines() if line.startswith("| `")]
    for key in (key for key in known_keys() if not key.startswith("models.")):
        variable = "FOREBAY_" + key.upper().replace(".", "__")
        assert len([row for row in rows if row.startswith(f"| `{key}` | `{variable}` |")]) == 1, key


def test_every_setting_has_a_meaning() -> None:
    rows = [line for line in settings_reference.render().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows if not row.rsplit("|", 2)[1].strip()] == [], "give it a description"


def test_the_commands_page_is_what_the_command_line_says() -> None:
    assert commands_reference.PAGE.read_text() == commands_reference.render(), "run: make reference"


def test_the_metrics_page_is_what_the_metrics_say() -> None:
    assert metrics_reference.PAGE.read_text() == metrics_reference.render(), "run: make reference"


def test_every_command_and_option_has_a_sentence_of_help() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name, command in commands.items() if not (command.help or "").strip()] == []
    options = [(name, option) for name, command in commands.items() for option in command.params]
    assert [f"{name} {option.opts[0]}" for name, option in options if not getattr(option, "help", None)] == []


def test_every_error_code_has_its_row_and_says_rightly_whether_to_try_again() -> None:
    lines = (ROOT / "docs" / "reference" / "errors.md").read_text().splitlines()
    cells = [[cell.strip(" `") for cell in line.split("|")[1:3]] for line in lines if line.startswith("| `")]
    assert cells == [[code.value, "yes" if code in RETRIABLE_CODES else "no"] for code in ErrorCode]
