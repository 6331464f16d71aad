"""The folder in which a replica keeps what took long to make, so that the next one finds it. Runs in the replica.

What lies here is run as code (AOTInductor packages), so the folder is this user's alone or it is not used. Replicas of
one machine meet here: a lock per file lets one make it while the others wait. Knows no model and no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from forebay.errors import ConfigError

_MEND = "set inference.cache_dir to a folder that this user owns and may write to"


def folder(named: str | None, kind: str) -> Path:
    """Return the folder for one kind of file, made where it is missing. Raises ConfigError where it is not safe.

    Without a name it is in the user's cache, or in the temporary folder where that cannot be written.
    """
    places = [Path(named)] if named else [_users_cache(), Path(tempfile.gettempdir()) / f"forebay-{os.getuid()}"]
    why = ""
    for place in places:
        try:
            found = place / kind
            found.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(found)
            return found
        except OSError as error:
            why = f"{place}: {error.strerror}"
    raise ConfigError(f"the cache cannot be written ({why}): {_MEND}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only one on this machine to make a file, from the look whether it is there until it is."""
    with open(path.with_name(path.name + ".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel lets go of it when this process dies
        yield


def put(path: Path, content: bytes) -> None:
    """Write a file that nobody ever sees in part."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)


def forget_older(place: Path, seconds: float) -> None:
    """Remove the files that nobody has written for so long."""
    oldest = time.time() - seconds
    for path in place.iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()


def _users_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "forebay"


def _check_owner(found: Path) -> None:
    known = found.stat()
    if known.st_uid != os.getuid() or stat.S_IMODE(known.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{found} is not this user's alone, and what lies there is run as code: {_MEND}")
