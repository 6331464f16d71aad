"""Threads of a CPU replica: the cores that there are, within the container's limit, shared by all replicas."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest

from forebay.inference import cores
from forebay.inference.assembly import build_pool
from forebay.sections.inference import ModelSettings
from forebay.settings import Batch, Delivery, Inference, Settings
from forebay.supervision.devices import settings_for


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "process_cpu_count", lambda: 8, raising=False)


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write a machine's /proc and /sys."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_limit_every_core_counts(tmp_path: Path) -> None:
    assert cores.cores(tmp_path) == 8
    root = machine(tmp_path, "0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "max 100000\n"})
    assert cores.cores(root) == 8


@pytest.mark.parametrize(("limit", "cores_"), [("250000 100000", 2), ("50000 100000", 1), ("6400000 100000", 8)])
def test_a_containers_limit_of_cpu_time_bounds_them(tmp_path: Path, limit: str, cores_: int) -> None:
    root = machine(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": limit})
    assert cores.cores(root) == cores_


def test_the_narrowest_group_on_the_way_up_decides(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/pod/one/cpu.max": "max 100000", "sys/fs/cgroup/pod/cpu.max": "300000 100000"}
    assert cores.cores(machine(tmp_path, "0::/pod/one\n", files)) == 3


def test_the_older_control_groups_are_read_too(tmp_path: Path) -> None:
    groups = "4:memory:/x\n3:cpu,cpuacct:/x\n0::/\n"
    files = {"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "400000\n", "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}
    assert cores.cores(machine(tmp_path, groups, files)) == 4
    files["sys/fs/cgroup/cpu/x/cpu.cfs_quota_us"] = "-1\n"
    assert cores.cores(machine(tmp_path, groups, files)) == 8


def test_processes_share_the_cores_and_each_has_one_at_least(tmp_path: Path) -> None:
    assert [cores.share(processes, tmp_path) for processes in (1, 3, 8, 20)] == [8, 2, 1, 1]


def threads(models: int = 1, **inference: object) -> set[tuple[int | None, int]]:
    served = [ModelSettings(name=f"m{number}", factory="a:B") for number in range(models)]
    sections = (Inference(**inference), Batch(), Delivery())  # type: ignore[arg-type]
    pool = build_pool(served, sections, [], count(1))
    found = {(replica._start.threads, replica._start.cpu_threads) for replica in pool._replicas}
    pool.stop()
    return found


def test_replicas_of_all_models_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores, "_ROOT", tmp_path)
    assert threads() == {(None, cores.cores())}
    assert threads(models=2, replicas=2) == {(None, max(cores.cores() // 4, 1))}
    assert threads(models=2, replicas=2, threads=3) == {(3, max(cores.cores() // 4, 1))}
    assert threads(replicas=4, executor="inline") == {(None, cores.cores())}  # they never run side by side


def test_workers_on_several_devices_without_cuda_share_them_too() -> None:
    settings = Settings(model=ModelSettings(factory="a:B"), inference=Inference(replicas=2))
    shared = settings_for(settings, "fake:0", ["fake:0", "fake:1"])
    assert shared.inference.threads == max(cores.cores() // 4, 1)
    assert settings_for(settings, "cuda:0", ["cuda:0", "cuda:1"]).inference.threads is None
