"""The service-time curve: what it says between, beyond and after what was measured."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.batching.curve import Curve


def line(rows: float) -> float:
    return 0.002 + 0.0001 * rows


def seeded(*rows: int, bucket: int = 0) -> Curve:
    curve = Curve()
    curve.seed([(one, line(one)) for one in rows], bucket)
    return curve


def test_a_curve_that_knows_nothing_predicts_nothing() -> None:
    assert (Curve().predict(0, 32), Curve().high(0, 32), Curve().points()) == (0.0, 0.0, [])


@pytest.mark.parametrize("rows", [1, 3, 7, 20, 31, 32, 50])
def test_a_held_out_size_is_read_within_a_tenth(rows: int) -> None:
    assert seeded(1, 2, 4, 8, 16, 32).predict(0, rows) == pytest.approx(line(rows), rel=0.1)


def test_steps_are_kept_and_not_smoothed_into_a_line() -> None:
    curve = Curve()
    curve.seed([(16, 0.001), (17, 0.002), (32, 0.002)])
    assert (curve.predict(0, 16), curve.predict(0, 17), curve.predict(0, 24)) == (0.001, 0.002, 0.002)


def test_a_bucket_that_never_ran_scales_with_its_elements_above_the_fixed_cost() -> None:
    curve = seeded(1, 32, bucket=100)
    assert curve.predict(200, 32) == pytest.approx(0.002 + 2 * 0.0032)
    assert curve.predict(50, 32) == pytest.approx(0.002 + 0.5 * 0.0032)
    assert curve.predict(100, 32) == pytest.approx(line(32))


def test_real_executions_replace_what_the_warm_up_measured() -> None:
    curve = seeded(8)
    curve.observe(0, 8, 0.5, 1.0)
    assert curve.predict(0, 8) == 0.5


def test_the_95th_percentile_lies_above_the_median() -> None:
    curve, dice = Curve(), random.Random(1)
    for number in range(200):
        curve.observe(0, 8, 0.001 if dice.random() < 0.9 else 0.01, number * 0.1)
    assert curve.predict(0, 8) == 0.001
    assert curve.high(0, 8) == 0.01


def test_sizes_that_did_not_run_since_the_machine_slowed_down_are_moved_along() -> None:
    curve = seeded(1, 8, 64)
    for number in range(100):
        curve.observe(0, 8, 2 * line(8), number * 0.1)
    assert curve.predict(0, 64) == pytest.approx(2 * line(64), rel=0.05)
    assert curve.predict(0, 1) == pytest.approx(2 * line(1), rel=0.05)


def test_noise_of_one_size_does_not_move_the_others() -> None:
    curve = seeded(1, 8, 64)
    for number in range(100):
        curve.observe(0, 8, 1.1 * line(8), number * 0.1)
    assert curve.predict(0, 64) == pytest.approx(line(64))


def test_the_largest_size_within_a_time_is_found() -> None:
    curve = seeded(1, 2, 4, 8, 16, 32)
    assert curve.largest(0, line(20), 32) == 20
    assert curve.largest(0, 1.0, 32) == 32
    assert curve.largest(0, 0.0001, 32) == 0


def test_points_tell_what_was_measured_by_bucket_and_rows() -> None:
    curve = seeded(1, 32, bucket=7)
    assert curve.buckets == [7]
    assert curve.points() == [(7, 1, line(1), line(1)), (7, 32, line(32), line(32))]


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0.0001, 1.0)), min_size=1, max_size=40),
    st.integers(0, 400),
    st.integers(0, 3),
)
def test_whatever_was_measured_predictions_are_never_negative(
    runs: list[tuple[int, float]], rows: int, bucket: int
) -> None:
    curve = Curve()
    for number, (size, seconds) in enumerate(runs):
        curve.observe(number % 2, size, seconds, float(number))
    assert curve.predict(bucket, rows) >= 0
    assert curve.high(bucket, rows) >= 0
    assert curve.predict(0, runs[0][0]) > 0
