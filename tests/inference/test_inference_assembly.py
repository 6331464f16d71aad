"""What a replica is told at its start, and which replicas share what."""

from __future__ import annotations

import gc
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.inference.assembly import build_pool
from forebay.inference.loading import load as load_model
from forebay.inference.loading import load_shared
from forebay.inference.messages import Start
from forebay.settings import load
from tests.inference.test_loading import start


def started(**changes: Any) -> list[Start]:
    settings = load(
        None,
        {"model.factory": "tests.models:Plain", **{key.replace("__", "."): value for key, value in changes.items()}},
    )
    sections = (settings.inference, settings.batch, settings.delivery)
    pool = build_pool(settings.served, sections, [Path.cwd()], count(1))
    found = [replica._start for replica in pool._replicas]
    pool.stop()
    return found


def test_a_replica_is_told_which_shapes_to_run_in_and_how() -> None:
    [told] = started(batch__allowed_batch_sizes="1,8,32", batch__shape_buckets="16,64", inference__compile="inductor")
    assert (told.sizes, told.buckets, told.compile, told.self_check, told.sharing) == (
        [1, 8, 32], [16, 64], "inductor", True, 1,
    )  # fmt: skip
    assert not started(inference__self_check=False)[0].self_check


@pytest.mark.parametrize(("executor", "share", "sharing"), [("process", 0.2, 1), ("thread", 0.8, 4)])
def test_processes_divide_the_memory_of_a_device_and_threads_share_one_model(
    executor: str, share: float, sharing: int
) -> None:
    found = started(inference__executor=executor, inference__replicas=4, inference__memory_fraction=0.8)
    assert [one.memory_fraction for one in found] == [pytest.approx(share)] * 4
    assert [one.sharing for one in found] == [sharing] * 4


def test_threads_load_a_model_once_and_nobody_keeps_it_when_they_are_gone() -> None:
    told = start(factory="tests.models:Plain", search=[str(Path.cwd())], sharing=2)
    first = load_shared(told, lambda: load_model(told, torch.device("cpu")))
    assert load_shared(told, lambda: load_model(told, torch.device("cpu"))) is first
    other = start(factory="tests.models:Plain", search=[str(Path.cwd())], sharing=2, options={"seconds": 1.0})
    assert load_shared(other, lambda: load_model(other, torch.device("cpu"))) is not first
    before = id(first)
    first.mark = True  # type: ignore[attr-defined]
    del first
    gc.collect()
    again = load_shared(told, lambda: load_model(told, torch.device("cpu")))
    assert not hasattr(again, "mark"), before
