"""Runs a test in namespaces of its own: a network that may lose packets, mounts that nobody else sees.

The test calls `runs_alone` first. Outside, that runs the same test again in a second pytest inside the namespaces, with
brokers of its own, and passes on whether it passed; inside, it says yes. Skips where a machine has no such namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_INSIDE = "FOREBAY_TEST_RUNS_ALONE"
_ROOT = Path(__file__).parents[2]


def runs_alone(request: pytest.FixtureRequest, namespace: str, needs: str, setup: str = "true") -> bool:
    """Whether this is the run inside. `namespace` is net or mount; `needs` a command that shows that all is there.

    `setup` is run inside before the test. A test takes its fixtures by `request.getfixturevalue`, and only inside.
    """
    if os.environ.get(_INSIDE):
        return True
    inside = ["unshare", "--user", "--map-root-user", f"--{namespace}", "sh", "-c"]
    if shutil.which("unshare") is None or _fails([*inside, f"{setup} && {needs}"]):
        pytest.skip(f"needs a {namespace} namespace in which this works: {needs}")
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-m", "long or not long"]
    done = subprocess.run(
        [*inside, f'{setup} && exec "$@"', "sh", *pytest_command, request.node.nodeid],
        cwd=_ROOT,
        env={**os.environ, _INSIDE: "yes", "QUICK_PYTHON": "0"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-2_000:]
    assert "1 passed" in done.stdout
    return False


def run(command: str) -> None:
    """Run a command of the shell."""
    subprocess.run(command, shell=True, check=True, capture_output=True, timeout=60)


def _fails(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode != 0
