"""Buckets, allowed sizes, merging and the caps of a batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.batching.batcher import Batcher
from forebay.batching.caps import Caps
from forebay.batching.curve import Curve
from forebay.batching.padding import bound, bucket_of, padded_rows, series
from forebay.batching.policy import Policy
from forebay.batching.sizes import Bounds
from forebay.records import Batch
from tests.unit.builders import request

AXES = ((0, 1),)


def ragged(*lengths: int, rows: int = 32, fixed: float = 1.0, buckets: tuple[int, ...] | None = None) -> Batcher:
    """A batcher of requests with these lengths, for a model of `fixed` seconds and 1 ms per padded element."""
    found = Batcher("model", Policy(Bounds(rows, 1 << 40), buckets=buckets), axes=AXES)
    found.curve.seed([(size, fixed + 0.001 * size * 10) for size in (1, 8, 32)], 10)
    for number, length in enumerate(lengths):
        found.add(request(f"{number}:{length}", shape=(length,), arrived=float(number)))
    return found


def lengths(batch: Batch | None) -> list[int]:
    assert batch is not None
    return sorted(one.shapes[0][1] for one in batch.requests)


@given(st.integers(1, 100_000))
def test_the_series_of_buckets_wastes_at_most_half(length: int) -> None:
    found = series(length)
    assert length <= found < 1.5 * length + 1
    assert series(found) == found


@pytest.mark.parametrize(("length", "expected"), [(1, 16), (16, 16), (17, 64), (65, 96), (97, 128)])
def test_explicit_buckets_hold_as_far_as_they_go(length: int, expected: int) -> None:
    assert bound(length, (16, 64)) == expected


def test_a_bucket_counts_the_padded_elements_of_a_row() -> None:
    one = request(shape=(5, 3), rows=2)
    assert bucket_of(one, ((0, 1),), None) == (18, (6,))
    assert bucket_of(one, ((0, 1), (0, 2)), (8,)) == (64, (8, 8))


@pytest.mark.parametrize(("rows", "padded"), [(1, 4), (4, 4), (5, 16), (16, 16), (17, 20), (40, 48)])
def test_rows_are_padded_to_allowed_sizes_and_larger_requests_run_in_pieces(rows: int, padded: int) -> None:
    assert padded_rows(rows, (4, 16)) == padded
    assert padded_rows(rows, ()) == rows


def test_like_lengths_go_together_where_an_execution_costs_little() -> None:
    found = ragged(10, 100, 11, 101, fixed=0.0)
    assert lengths(found.cut(9.0, free_at=0.0)) == [10, 11]
    assert lengths(found.cut(9.0, free_at=0.0)) == [100, 101]


def test_all_lengths_go_together_where_an_execution_costs_more_than_padding() -> None:
    found = ragged(10, 100, 11, 101, fixed=10.0)
    batch = found.cut(9.0, free_at=0.0)
    assert lengths(batch) == [10, 11, 100, 101]
    assert batch is not None
    assert batch.bucket == 128
    assert found.padding(batch) == (222, 4 * 101 - 222)


def test_a_merge_takes_the_nearest_bucket_first_and_respects_the_bound() -> None:
    found = ragged(10, 100, 13, 14, rows=3, fixed=10.0)
    assert lengths(found.cut(9.0, free_at=0.0)) == [10, 13, 14]
    assert lengths(found.cut(9.0, free_at=0.0)) == [100]
    assert not found.requests


def test_what_may_not_be_padded_is_never_merged() -> None:
    found = ragged(fixed=10.0)
    found.add(request("a", lane="a", shape=(4,)))
    found.add(request("b", lane="b", shape=(4,)))
    assert lengths(found.cut(0.0, free_at=0.0)) == [4]


def test_padding_counts_up_to_explicit_buckets() -> None:
    found = ragged(10, 12, buckets=(16, 64))
    batch = found.cut(9.0, free_at=0.0)
    assert batch is not None
    assert found.padding(batch) == (22, 10)


def test_the_memory_cap_of_a_bucket_holds_for_larger_buckets_too() -> None:
    caps = Caps(Policy(Bounds(32, 1 << 40)), Curve())
    caps.remember(64, 8)
    assert (caps.rows(32), caps.rows(64), caps.rows(128)) == (32, 8, 8)
    caps.remember(64, None)
    assert (caps.rows(64), caps.memory()) == (32, {})


def test_a_batch_has_a_row_at_least_whatever_the_target() -> None:
    curve = Curve()
    curve.seed([(1, 5.0)])
    assert Caps(Policy(Bounds(32, 1 << 40), target_latency=0.001), curve).rows(0) == 1


def test_a_cap_keeps_to_allowed_sizes() -> None:
    found = Batcher("model", Policy(Bounds(32, 1 << 40), allowed=(4, 16, 32)))
    found.caps.remember(0, 20)
    for number in range(40):
        found.add(request(str(number)))
    batch = found.cut(0.0, free_at=0.0)
    assert batch is not None
    assert batch.rows == 16


@pytest.mark.parametrize(
    ("unit", "bound", "expected"), [("elements", 320, [4, 4, 1]), ("bytes", 1_280, [4, 4, 1]), ("rows", 6, [4, 4, 1])]
)
def test_the_cost_counts_the_shapes_that_the_model_runs_in(unit: Any, bound: int, expected: list[int]) -> None:
    """The cost was padded to the longest request alone: 5 rows of 17 (85) ran as 8 rows of 40 (320)."""
    policy = Policy(Bounds(8, 1 << 40, bound - 1, unit), allowed=(1, 4, 8), buckets=(8, 16, 40))
    found = Batcher("model", policy, axes=AXES)
    for number in range(9):
        found.add(request(str(number), shape=(17,)))
    assert [len(lengths(found.cut(9.0, free_at=0.0))) for _ in expected] == expected


def test_a_request_that_takes_the_place_of_padding_costs_nothing() -> None:
    policy = Policy(Bounds(8, 1 << 40, 100, "elements"), allowed=(8,), buckets=(16,))
    found = Batcher("model", policy, axes=AXES)
    for number in range(8):
        found.add(request(str(number), shape=(10,)))
    assert len(lengths(found.cut(9.0, free_at=0.0))) == 8


def test_lengths_beyond_all_buckets_cost_what_they_are() -> None:
    found = Batcher("model", Policy(Bounds(8, 1 << 40, 100, "elements"), buckets=(16,)), axes=AXES)
    for number in range(4):
        found.add(request(str(number), shape=(25,)))
    assert len(lengths(found.cut(9.0, free_at=0.0))) == 4
