"""The top of the command line: how a command ends, whatever happens in it."""

from __future__ import annotations

from importlib import import_module

import pytest
import typer

from forebay.errors import ConfigError, DeviceLostError, KafkaUnavailableError, UsageError

top = import_module("forebay.cli.app")  # the package has the application itself under that name


@pytest.mark.parametrize(
    ("raised", "code", "last"),
    [
        (UsageError("no"), 2, "forebay: no"),
        (KafkaUnavailableError("no"), 69, "forebay: no"),
        (DeviceLostError("no"), 75, "forebay: no"),
        (ConfigError("no"), 78, "forebay: no"),
        (typer.Abort(), 130, ""),
        (KeyboardInterrupt(), 130, ""),
        (RuntimeError("what?"), 70, "forebay: internal error, RuntimeError: what?; this is a bug of Forebay's"),
        (AssertionError(), 70, "forebay: internal error, AssertionError; this is a bug of Forebay's"),
    ],
)
def test_a_command_ends_with_the_code_of_the_contract(
    raised: BaseException, code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that nobody expected ended with 1, which says of a command that a request failed."""

    def fail(**_: object) -> None:
        raise raised

    monkeypatch.setattr(top, "app", fail)
    with pytest.raises(SystemExit) as ended:
        top.main()
    assert ended.value.code == code
    lines = capsys.readouterr().err.splitlines() or [""]
    assert lines[-1].startswith(last)
    assert (lines[0].startswith("Traceback")) is (code == 70)
