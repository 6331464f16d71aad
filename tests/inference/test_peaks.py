"""Batches by predicted memory: what the warm-up measured says what fits, before the device has to refuse it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay import Model, TensorSpec
from forebay.inference.matching import finished
from forebay.inference.peaks import Peaks
from tests.inference.test_accelerator import Wide, accelerator, fake, traced
from tests.inference.test_runner import Bench, ids, ordinary


def test_between_measured_sizes_the_line_through_them_counts() -> None:
    peaks = Peaks([(0, 1, 100), (0, 2, 150), (0, 4, 350)])
    assert [peaks.bytes(0, rows) for rows in (1, 2, 3, 4, 5, 8)] == [100, 150, 250, 350, 450, 750]


def test_between_buckets_it_is_the_padded_elements_that_count() -> None:
    peaks = Peaks([(8, 1, 800), (8, 4, 3_200), (64, 1, 6_400), (64, 4, 25_600)])
    assert peaks.bytes(8, 2) == 1_600
    assert peaks.bytes(36, 1) == 3_600
    assert peaks.bytes(4, 2) == 800
    assert peaks.bytes(128, 3) == 2 * 19_200


def test_the_most_rows_that_fit_are_found_and_follow_the_room() -> None:
    peaks = Peaks([(0, 1, 100), (0, 8, 800)], room=450)
    assert (peaks.rows(0, 32), peaks.bound(0, 32)) == (4, 4)
    peaks.room = 10_000
    assert (peaks.rows(0, 32), peaks.bound(0, 32)) == (32, 0)
    peaks.room = 10
    assert peaks.rows(0, 32) == 1  # whether one row fits, only a try can say
    assert peaks.fits(0, 1, 0) is False


def test_without_a_measurement_or_a_known_room_there_is_no_bound() -> None:
    for peaks in (Peaks(), Peaks(room=10), Peaks([(0, 1, 100)])):
        assert (peaks.rows(0, 32), peaks.bound(7, 32), peaks.fits(0, 32, 10**9)) == (32, 0, True)


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(1, 64), st.integers(1, 10**6)), min_size=1),
    st.integers(1, 128), st.integers(1, 64), st.integers(1, 10**6),
)  # fmt: skip
def test_what_is_called_fitting_is_predicted_to_fit(points: Any, bucket: int, largest: int, room: int) -> None:
    peaks = Peaks({(bucket, rows): (bucket, rows, size) for bucket, rows, size in points}.values(), room)
    rows = peaks.rows(bucket, largest)
    assert 1 <= rows <= largest
    assert rows == 1 or peaks.bytes(bucket, rows) <= room


class Attends(Model):
    """Makes a matrix of length by length for each row, as attention does."""

    inputs = (TensorSpec("ids", "INT64", [-1, -1], pad=0),)
    outputs = (TensorSpec("sum", "INT64", [-1]),)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores = ids.float().unsqueeze(2) * ids.float().unsqueeze(1)
        scores.add_(1)
        return ids.sum(1) + (scores.sum((1, 2)) * 0).long()


def refusals(bench: Bench) -> int:
    backend = fake(bench.device)
    return backend.allocator.refused + sum(event.startswith("refuse") for event in traced(bench.device))


@pytest.mark.parametrize("memory", [60_000, 140_000, 400_000])
def test_a_mix_of_sizes_never_runs_out_of_memory_after_the_warm_up(memory: int) -> None:
    bench = Bench(Attends(), limit=32, buckets=[8, 32, 64], device=accelerator(f"memory={memory}"))
    bench.warm_up()
    after_warm_up = refusals(bench)
    assert after_warm_up, "this memory holds everything, so the test says nothing"
    chance = random.Random(memory)
    for _ in range(60):
        length = chance.choice([8, 32, 64])
        rows = [[chance.randint(1, 9) for _ in range(length)] for _ in range(chance.randint(1, 32))]
        job = bench.submit([ids(str(number), row) for number, row in enumerate(rows)], bucket=length)
        back = finished(bench.replica, bench.runner.run(job), 0.0)
        assert back.failures == []
        assert sum(len(requests) for requests, _ in back.results) == len(rows)
    assert refusals(bench) == after_warm_up


def test_a_batch_that_would_not_fit_beside_the_one_in_front_waits_for_it() -> None:
    bench = Bench(Wide(), limit=32, device=accelerator("memory=200000"))
    bench.warm_up()
    assert refusals(bench) == 0
    peak = bench.runner.launcher.peaks.bytes(0, 32)
    fake(bench.device).allocator.limit = room = int(peak)  # since then somebody else took the rest
    bench.runner.launcher.peaks.room = room
    first = bench.runner.begin(bench.submit(ordinary(32)))
    second = bench.runner.begin(bench.submit(ordinary(32)), beside=True)
    assert first.launch is not None
    assert second.launch is None
    for flight in (first, second):
        assert finished(bench.replica, bench.runner.finish(flight), 0.0).failures == []
    assert refusals(bench) == 0


def test_what_the_prediction_allows_is_told_to_the_batcher() -> None:
    bench = Bench(Attends(), limit=32, buckets=[64], device=accelerator("memory=140000"))
    found = bench.warm_up()
    assert found.peaks
    job = bench.submit([ids("a", [1] * 64)], bucket=64)
    cap = finished(bench.replica, bench.runner.run(job), 0.0).timings.cap
    assert cap is not None
    assert bench.runner.launcher.peaks.bytes(64, cap) <= 140_000


def test_a_model_whose_rows_differ_within_a_bucket_is_not_predicted() -> None:
    class Free(Wide):
        inputs = (TensorSpec("x", "FP32", [-1, -1]),)

    bench = Bench(Free(), device=accelerator("memory=140000"))
    bench.warm_up()
    assert bench.runner.launcher.peaks.room is None
