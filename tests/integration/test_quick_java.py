"""The cache that brokers of the tests start from: it is used while it is there, and its lack stops nothing."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests import quick_java as module
from tests.conftest import EmbeddedKafkas
from tests.quick_java import LITTLE_COMPILING, VARIABLE, quick_java


def test_the_options_are_added_meanwhile_and_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "-Dmine=1")
    with quick_java(None):
        assert os.environ[VARIABLE] == f"-Dmine=1 {LITTLE_COMPILING}"
    assert os.environ[VARIABLE] == "-Dmine=1"
    monkeypatch.delenv(VARIABLE)
    with quick_java(None):
        assert os.environ[VARIABLE] == LITTLE_COMPILING
    assert VARIABLE not in os.environ


def test_a_java_that_makes_no_cache_leaves_none_and_brokers_start_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "jre" / "bin" / "java"
    java.parent.mkdir(parents=True)
    (tmp_path / "jre" / "release").write_text("JAVA_VERSION=21")
    java.write_text('#!/bin/sh\ncase "$*" in *AOTCacheOutput*) echo "Unrecognized VM option" >&2; exit 1 ;; esac\n')
    java.chmod(0o755)
    monkeypatch.setattr(module, "java", lambda: java)
    monkeypatch.setattr(module, "class_path", lambda announce: [tmp_path / "kafka.jar"])
    monkeypatch.setenv(VARIABLE, "")
    (tmp_path / "cache").mkdir()
    with quick_java(tmp_path / "cache"):
        assert os.environ[VARIABLE] == LITTLE_COMPILING
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["lock"]


def test_a_broker_of_a_test_starts_with_them(embedded_kafka: EmbeddedKafkas) -> None:
    [pid] = embedded_kafka().java_pids()
    assert LITTLE_COMPILING in psutil.Process(pid).environ()[VARIABLE]
