"""A transactional id that is stable and unique: the same after a restart, never the same for two live workers."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import tempfile
from itertools import count
from pathlib import Path

from forebay.errors import ConfigError

_held: list[int] = []


def transactional_id(group_id: str) -> str:
    """Return `GROUP-HOST-N` with the lowest N that no other live worker of this host has.

    A lock on a file in the temporary folder holds N until the process ends, however it ends. Raises ConfigError where
    there is no such folder, or it takes no file.
    """
    host = socket.gethostname()
    name = hashlib.sha256(group_id.encode()).hexdigest()[:12]
    try:
        folder = Path(tempfile.gettempdir())
        return next(f"{group_id}-{host}-{n}" for n in count() if _takes(folder / f"forebay-{name}-{n}.lock"))
    except OSError as error:
        where = error.filename or "the temporary folder"
        raise ConfigError(
            f"the lock that gives this worker its transactional id cannot be had: {where}: {error.strerror or error}; "
            "set delivery.transactional_id, different for each worker, or TMPDIR to a folder that takes files"
        ) from error


def _takes(path: Path) -> bool:
    """Whether the lock was free, and is this process's now."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError as error:  # a file system without locks
        os.close(descriptor)
        raise OSError(error.errno, error.strerror, str(path)) from error
    _held.append(descriptor)
    return True
