"""A transactional id that is stable and unique: the same after a restart, never the same for two live workers."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import tempfile
from itertools import count
from pathlib import Path

_held: list[int] = []


def transactional_id(group_id: str) -> str:
    """Return `GROUP-HOST-N` with the lowest N that no other live worker of this host has.

    A lock on a file in the temporary folder holds N until the process ends, however it ends.
    """
    host = socket.gethostname()
    name = hashlib.sha256(group_id.encode()).hexdigest()[:12]
    for number in count():
        path = Path(tempfile.gettempdir()) / f"forebay-{name}-{number}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        _held.append(descriptor)
        return f"{group_id}-{host}-{number}"
    raise AssertionError("unreachable")
