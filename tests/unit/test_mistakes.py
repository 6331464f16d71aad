"""Wrong settings: one sentence for each, with where it comes from and what to write instead."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.errors import ConfigError
from forebay.mistakes import SettingsError
from forebay.settings import load


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)


def refused(overrides: dict[str, Any] | None = None) -> SettingsError:
    with pytest.raises(SettingsError) as raised:
        load(None, overrides)
    return raised.value


def test_several_mistakes_have_a_line_each_and_one_has_no_heading() -> None:
    """They came as one line of many hundred characters."""
    several = refused({"batch.max_batch_size": 0, "kafka.nope": 1, "ops.port": 99_999})
    heading, *lines = str(several).split("\n")
    assert heading == "3 settings are wrong:"
    assert lines == [f"  {one}" for one in several.mistakes]
    assert sorted(line.split()[0] for line in lines) == ["batch.max_batch_size:", "ops.port:", "unknown"]
    assert str(refused({"ops.port": 99_999})) == "ops.port: it must be at most 65535, not 99999"


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("batch.max_batch_size", 0, "batch.max_batch_size: it must be at least 1, not 0"),
        ("batch.max_wait_ms", "soon", "batch.max_wait_ms: it must be a number, not 'soon'"),
        ("models", 3, "models: it must be a list, not 3"),
        ("kafka", 3, "kafka: it must be a section with settings below it, such as kafka.NAME, not 3"),
        ("inference.self_check", "perhaps", "inference.self_check: it must be true or false, not 'perhaps'"),
    ],
)
def test_a_wrong_value_is_told_in_words_for_a_person(key: str, value: Any, told: str) -> None:
    assert refused({key: value}).mistakes == [told]


def test_a_mistake_in_a_variable_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_BATCH__MAX_BATCH_SIZE", "0")
    monkeypatch.setenv("FOREBAY_KAFKA__GRUOP_ID", "x")
    assert sorted(refused().mistakes) == [
        "batch.max_batch_size (from FOREBAY_BATCH__MAX_BATCH_SIZE): it must be at least 1, not '0'",
        "unknown key kafka.gruop_id (from FOREBAY_KAFKA__GRUOP_ID); did you mean kafka.group_id?",
    ]
    assert "from" not in refused({"batch.max_batch_size": 0, "kafka.gruop_id": 1}).mistakes[0]


def test_every_unknown_variable_is_named_and_none_is_proposed_that_has_nothing_in_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FOREBAY_X was asked whether it meant FOREBAY_OPS__PORT."""
    monkeypatch.setenv("FOREBAY_X", "1")
    monkeypatch.setenv("FOREBAY_GROUP_ID", "1")
    told = {one.split(";")[0]: one for one in refused().mistakes}
    assert told["unknown environment variable FOREBAY_X"].endswith(
        "a setting is FOREBAY_SECTION__NAME, such as FOREBAY_KAFKA__GROUP_ID"
    )
    assert told["unknown environment variable FOREBAY_GROUP_ID"].endswith("did you mean FOREBAY_KAFKA__GROUP_ID?")


@pytest.mark.parametrize(
    "overrides", [{"batch": 3, "batch.max_batch_size": 3}, {"ops.port": 1, "ops.port.x": 2, "ops.port.x.y": 3}]
)
def test_a_value_and_a_part_of_it_on_one_command_line_are_refused(overrides: dict[str, Any]) -> None:
    """It ended in a TypeError."""
    with pytest.raises(ConfigError, match="cannot be set beside"):
        load(None, overrides)


def test_check_has_a_finding_for_each_mistake() -> None:
    command = ["check", "--json", "--set", "batch.max_batchsize=3", "--set", "ops.port=99999"]
    result = CliRunner().invoke(app, command, standalone_mode=False)
    assert result.return_value == 78
    assert [one["question"] for one in json.loads(result.output)["findings"]] == ["settings", "settings"]
