"""How many cores this process may use: those that it may run on, within the CPU time that its container gives it.

Pure standard library. torch knows the affinity and not the container's limit: with 64 cores and a limit of two CPUs it
starts 64 threads, which then stand still for most of every scheduling period.
"""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/")


def share(processes: int, root: Path = _ROOT) -> int:
    """Return the cores for each of some processes that compute side by side; at least one."""
    return max(cores(root) // max(processes, 1), 1)


def cores(root: Path = _ROOT) -> int:
    """Return the cores that this process may keep busy. `root` is where /proc and /sys are, for tests."""
    count = getattr(os, "process_cpu_count", None)  # Python 3.13; it also knows -X cpu_count
    if count is not None:
        available = count() or 1
    else:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(root)
    return available if quota is None else max(min(available, int(quota)), 1)


def _quota(root: Path) -> float | None:
    """Return the CPUs' worth of time that the control group allows, the least of it and those above; None: no limit."""
    found: list[float] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            base, limit = root / "sys/fs/cgroup", _quota_2
        elif "cpu" in controllers.split(","):
            base, limit = root / "sys/fs/cgroup/cpu", _quota_1
        else:
            continue
        group = Path(path.lstrip("/"))
        # In a container the path may be the host's, and only the mount's root is there.
        found += [quota for part in (group, *group.parents) if (quota := limit(base / part)) is not None]
    return min(found, default=None)


def _quota_2(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _quota_1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
