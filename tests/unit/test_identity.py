"""The transactional id of a worker: the lowest number that is free on this host, and what is said where none is."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

from forebay.errors import ConfigError
from forebay.stream import identity
from forebay.stream.identity import transactional_id


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(identity, "_held", [])
    return tmp_path


def test_each_takes_the_lowest_number_that_is_free() -> None:
    first, second, other = transactional_id("g"), transactional_id("g"), transactional_id("h")
    assert [first[-2:], second[-2:], other[-2:]] == ["-0", "-1", "-0"]
    os.close(identity._held[0])
    assert transactional_id("g") == first


def test_a_folder_that_takes_no_file_is_a_wrong_configuration_with_its_mend(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a container that may not write: it used to be an internal error with a traceback."""

    def full(path: Any, *_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(ConfigError, match=r"No space left on device; set delivery.transactional_id.* or TMPDIR"):
        transactional_id("g")


def test_a_host_without_a_temporary_folder_is_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(ConfigError, match=r"No usable temporary directory .*; set delivery.transactional_id"):
        transactional_id("g")


def test_a_file_system_without_locks_ends_the_search_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to try one number after the other, for ever."""

    def refuse(*_: Any) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"\.lock: No locks available"):
        transactional_id("g")
