"""The simulated worker: the numbers of queueing theory and of the specification, through the real batcher.

The model of the specification takes 2 ms and 0.1 ms for each row, at most 32 rows; arrivals are random, `linger` waits
5 ms. Times are in milliseconds, of a clock that only the simulation moves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from forebay.batching.policy import Policy
from forebay.batching.simulation import Machine, optimum, simulate
from forebay.batching.sizes import Bounds
from forebay.batching.trace import Arrival, Run, poisson, quantile

LARGEST = 32
PEAK = LARGEST / 0.0052
BOUNDS = Bounds(LARGEST, 1 << 30)


def service(bucket: int, rows: int) -> float:
    return 0.002 + 0.000_1 * rows


KNOWN = {0: [(rows, service(0, rows)) for rows in (1, 2, 4, 8, 16, 32)]}
MACHINE = Machine(service, known=KNOWN)


@cache
def arrivals(rate: float, count: int, burst: int = 1) -> tuple[Arrival, ...]:
    return tuple(poisson(rate, count, seed=7, burst=burst))


def run(traffic: Sequence[Arrival], machine: Machine = MACHINE, **policy: Any) -> Run:
    return simulate(traffic, Policy(**{"bounds": BOUNDS, **policy}), machine)


def at(*times_ms: float, **options: Any) -> list[Arrival]:
    return [Arrival(time / 1000, **options) for time in times_ms]


def in_ms(latencies: Sequence[float]) -> list[float]:
    return [round(latency * 1000, 3) for latency in latencies]


@pytest.mark.parametrize(
    ("dispatch", "rate", "count", "p50", "p99", "mean_batch", "busy"),
    [
        ("eager", 50, 3_000, 2.1, 4.0, 1.0, 0.10),
        ("eager", 1_000, 6_000, 3.4, 4.8, 2.3, 0.95),
        ("eager", 3_000, 8_000, 4.4, 6.5, 8.5, 1.00),
        ("eager", 5_500, 20_000, 6.8, 10.8, 24.0, 1.00),
        ("linger", 50, 3_000, 7.1, 7.3, 1.3, 0.08),
        ("linger", 1_000, 6_000, 5.7, 8.0, 6.0, 0.43),
        ("linger", 3_000, 8_000, 6.4, 9.1, 15.9, 0.67),
        ("linger", 5_500, 20_000, 7.6, 11.1, 28.1, 0.93),
    ],
)
def test_latency_batch_and_busy_share_are_those_of_the_specification(
    dispatch: str, rate: float, count: int, p50: float, p99: float, mean_batch: float, busy: float
) -> None:
    found = run(arrivals(rate, count), dispatch=dispatch, max_wait=0.005)
    assert found.quantile(0.5) * 1000 == pytest.approx(p50, rel=0.04)
    assert found.quantile(0.99) * 1000 == pytest.approx(p99, rel=0.06)
    assert found.mean_batch == pytest.approx(mean_batch, rel=0.04)
    assert found.busy_share == pytest.approx(busy, abs=0.015)


def test_bursts_leave_together_and_need_no_wait() -> None:
    found = run(arrivals(1_000, 8_000, burst=16))
    assert found.quantile(0.5) * 1000 == pytest.approx(3.6, rel=0.04)
    assert found.quantile(0.99) * 1000 == pytest.approx(8.5, rel=0.06)
    assert found.mean_batch == pytest.approx(16.4, rel=0.04)


@pytest.mark.parametrize("load", [0.05, 0.2, 0.5, 0.8, 0.95])
def test_late_binding_is_within_a_twentieth_of_the_work_conserving_optimum(load: float) -> None:
    traffic = arrivals(load * PEAK, 5_000)
    found, best = run(traffic), optimum(traffic, service, LARGEST)
    assert found.mean_latency <= 1.05 * best.mean_latency
    assert found.quantile(0.99) <= 1.05 * best.quantile(0.99)


def test_binding_a_batch_early_costs_what_late_binding_saves() -> None:
    """The comparison above must be able to fail: a lead longer than any execution binds as soon as there is room."""
    traffic = arrivals(0.5 * PEAK, 5_000)
    assert run(traffic, lead=1.0, lead_share=1.0).mean_latency > 1.3 * optimum(traffic, service, LARGEST).mean_latency


def test_a_backlog_leaves_no_gap_between_executions_although_a_batch_costs_overhead() -> None:
    backlog = at(*[0.0] * 640)
    found = run(backlog, replace(MACHINE, overhead=0.000_5))
    assert in_ms(found.gaps) == [0.5, *[0.0] * 19]
    assert found.ended * 1000 == pytest.approx(20 * 5.2 + 0.5)


def test_the_overhead_is_paid_where_nothing_runs_meanwhile() -> None:
    found = run(at(0.0, 50.0), replace(MACHINE, overhead=0.000_5))
    assert in_ms(found.latencies) == [2.6, 2.6]


def test_members_that_come_while_a_batch_runs_leave_with_the_next_one() -> None:
    found = run(at(0.0, 0.1, 0.2, *[1.0] * 10))
    assert found.sizes == [1, 12]
    assert in_ms(found.latencies[1:3]) == [5.2, 5.1]


def test_linger_counts_from_the_oldest_arrival() -> None:
    found = run(at(0.0, 1.0, 4.0, 100.0), dispatch="linger", max_wait=0.005)
    assert found.sizes == [3, 1]
    assert in_ms(found.latencies[:3]) == [7.3, 6.3, 3.3]
    assert found.cuts["linger_expired"] == 1


def test_static_runs_full_batches_and_the_rest_at_the_end() -> None:
    found = run(at(*range(40)), dispatch="static")
    assert found.sizes == [32, 8]
    assert in_ms(found.latencies)[0] == 31 + 5.2
    assert found.cuts == {"full_rows": 1, "drain": 1}


def test_two_replicas_run_side_by_side_and_the_one_that_is_free_first_gets_the_next_batch() -> None:
    found = run(at(0.0, 0.5, 0.6), replace(MACHINE, replicas=2))
    assert in_ms(found.latencies) == [2.1, 2.1, 3.6]
    assert found.busy_share == pytest.approx(6.3 / (2 * 4.2))


def test_several_replicas_are_within_a_twentieth_of_their_optimum() -> None:
    traffic = arrivals(0.8 * 3 * PEAK, 8_000)
    found, best = run(traffic, replace(MACHINE, replicas=3)), optimum(traffic, service, LARGEST, 3)
    assert found.mean_latency <= 1.05 * best.mean_latency


def test_what_the_worker_has_no_room_for_waits_in_the_topic_and_its_wait_counts() -> None:
    found = run(at(*[0.0] * 8), replace(MACHINE, queue=4), bounds=Bounds(4, 1 << 30))
    assert found.sizes == [4, 4]
    assert in_ms(found.latencies) == [2.4] * 4 + [4.8] * 4
    assert found.unanswered == 0


def test_full_batches_that_the_queue_has_no_room_for_are_told_as_unanswered() -> None:
    found = run(at(*range(40)), replace(MACHINE, queue=16), dispatch="static")
    assert (found.executions, found.unanswered) == (0, 40)


def test_a_request_that_cannot_be_served_in_time_expires_and_costs_no_execution() -> None:
    late = Arrival(0.001, deadline=0.004)
    found = run([*at(*[0.0] * 32), late, *at(2.0)])
    assert found.expired == 1
    assert len(found.latencies) == 33
    assert sum(found.sizes) == 33


def test_a_request_larger_than_a_batch_runs_in_pieces() -> None:
    found = run(at(0.0, rows=80))
    assert in_ms(found.latencies) == [5.2 + 5.2 + 3.6]


def test_row_padding_is_computed_and_counted() -> None:
    found = run(at(*[0.0] * 5, dims=((10,),)), replace(MACHINE, axes=((0, 1),)), allowed=(8,), padding="pad_up")
    assert in_ms(found.latencies)[0] == 2.8
    assert found.padding_efficiency == 5 / 8


def test_ragged_requests_of_like_length_go_together() -> None:
    """Log-normal lengths with a median of 27, at most 128, from a backlog: padding is computed, too."""
    dice = random.Random(3)
    lengths = [min(128, max(1, round(dice.lognormvariate(3.3, 0.8)))) for _ in range(2_000)]
    traffic = [Arrival(0.0, dims=((length,),)) for length in lengths]

    def by_length(bucket: int, rows: int) -> float:
        return 0.001 + 0.000_004 * bucket * rows

    known = {
        bucket: [(rows, by_length(bucket, rows)) for rows in (1, 8, 32)]
        for bucket in (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    }
    found = run(traffic, Machine(by_length, known=known, axes=((0, 1),)))
    in_order = [lengths[start : start + 32] for start in range(0, len(lengths), 32)]
    blind = sum(lengths) / sum(len(batch) * max(batch) for batch in in_order)
    assert blind < 0.4
    assert found.padding_efficiency >= 0.8


def test_requests_of_different_kinds_never_share_a_batch() -> None:
    mixed = [Arrival(0.0, kind=number % 2) for number in range(64)]
    assert run(mixed).sizes == [32, 32]


def test_a_batcher_that_knows_nothing_learns_the_service_time_while_it_runs() -> None:
    traffic = arrivals(0.5 * PEAK, 4_000)
    taught, untaught = run(traffic), run(traffic, Machine(service))
    assert untaught.mean_latency <= 1.05 * taught.mean_latency


def test_every_execution_has_a_reason() -> None:
    found = run(arrivals(3_000, 8_000))
    assert sum(found.cuts.values()) == found.executions == len(found.gaps)


def test_random_arrivals_have_the_rate_and_the_bursts_that_were_asked_for_and_can_be_repeated() -> None:
    traffic = poisson(200.0, 8_000, seed=5, burst=4)
    assert traffic == poisson(200.0, 8_000, seed=5, burst=4) != poisson(200.0, 8_000, seed=6, burst=4)
    assert 8_000 / traffic[-1].at == pytest.approx(200, rel=0.05)
    assert len({arrival.at for arrival in traffic}) == 2_000


def test_no_arrivals_are_a_run_of_nothing() -> None:
    found = run([])
    assert (found.executions, found.busy_share, found.mean_latency, found.mean_batch) == (0, 0.0, 0.0, 0.0)
    assert found.quantile(0.99) == optimum([], service, LARGEST).quantile(0.5) == quantile([], 0.5) == 0.0
