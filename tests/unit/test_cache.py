"""The replicas' cache: this user's alone, whole files or none, and one maker at a time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from forebay.errors import ConfigError
from forebay.inference import cache


def test_the_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    found = cache.folder(str(tmp_path / "a" / "b"), "aoti")
    assert found == tmp_path / "a" / "b" / "aoti"
    assert found.stat().st_mode & 0o777 == 0o700
    assert cache.folder(str(tmp_path / "a" / "b"), "aoti") == found


def test_a_folder_that_others_may_write_to_is_refused_since_its_files_are_run_as_code(tmp_path: Path) -> None:
    (tmp_path / "aoti").mkdir()
    (tmp_path / "aoti").chmod(0o777)
    with pytest.raises(ConfigError, match=r"run as code: set inference\.cache_dir"):
        cache.folder(str(tmp_path), "aoti")


def test_without_a_name_it_is_the_users_cache_or_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert cache.folder(None, "x") == tmp_path / "mine" / "forebay" / "x"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    assert cache.folder(None, "x") == tmp_path / "temporary" / f"forebay-{os.getuid()}" / "x"
    with pytest.raises(ConfigError, match="cannot be written"):
        cache.folder(str(tmp_path / "file"), "x")


def test_one_makes_a_file_while_the_others_wait(tmp_path: Path) -> None:
    made: list[int] = []

    def make(number: int) -> None:
        with cache.locked(tmp_path / "it"):
            if not (tmp_path / "it").exists():
                made.append(number)
                cache.put(tmp_path / "it", b"%d" % number)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "it").read_bytes() == b"%d" % made[0]
    assert len(made) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it", "it.lock"]


def test_old_files_are_forgotten_and_new_ones_kept(tmp_path: Path) -> None:
    cache.put(tmp_path / "old", b"")
    os.utime(tmp_path / "old", (1, 1))
    cache.put(tmp_path / "new", b"")
    cache.forget_older(tmp_path, 60)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
