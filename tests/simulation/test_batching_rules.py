"""The rules of batching that show over thousands of requests, in made-up time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.batching.policy import Policy
from forebay.batching.simulation import Machine, simulate
from forebay.batching.sizes import Bounds
from forebay.batching.trace import Arrival, poisson
from tests.unit.builders import request
from tests.unit.test_batching_rules import KNOWN, MS, WIDE, batcher, cut, run, service


@st.composite
def traffic(draw: st.DrawFn) -> list[Arrival]:
    """Bursts and pauses of requests of several shapes, sizes, priorities and partitions, some with a deadline."""
    now, arrivals = 0.0, []
    for _ in range(draw(st.integers(1, 40))):
        now += draw(st.sampled_from([0.0, 0.0, 0.1, 1.0, 7.0])) * MS
        patience = draw(st.none() | st.sampled_from([1.0, 6.0, 40.0]))
        arrivals.append(
            Arrival(
                now,
                rows=draw(st.integers(1, 10)),
                kind=draw(st.integers(0, 2)),
                priority=draw(st.integers(1, 9)),
                deadline=None if patience is None else now + patience * MS,
                partition=draw(st.integers(0, 3)),
            )
        )
    return arrivals


@given(
    arrivals=traffic(),
    dispatch=st.sampled_from(["eager", "linger"]),
    wait=st.sampled_from([0.5, 5.0]),
    replicas=st.integers(1, 3),
)
def test_no_request_waits_longer_than_its_linger_while_a_replica_is_free(
    arrivals: list[Arrival], dispatch: Any, wait: float, replicas: int
) -> None:
    """A replica that is idle beside a waiting request is idle for `max_wait` at most, in eager mode not at all."""
    policy = Policy(Bounds(8, WIDE), dispatch, wait * MS)
    found = simulate(arrivals, policy, Machine(service, replicas=replicas, known={0: KNOWN[:4]}))
    assert max(found.gaps, default=0.0) <= (wait * MS if dispatch == "linger" else 0.0) + 1e-9
    assert found.unanswered == 0
    assert len(found.latencies) + found.expired == len(arrivals)
    assert sum(found.cuts.values()) == found.executions


@pytest.mark.parametrize(("rate", "mean", "high", "batch"), [(50, 2.2, 4.0, 1.0), (1000, 3.4, 4.8, 2.3)])
def test_s3_an_idle_replica_takes_what_waits(rate: float, mean: float, high: float, batch: float) -> None:
    found = run(poisson(rate, 8_000))
    assert found.mean_latency / MS == pytest.approx(mean, rel=0.05)
    assert found.quantile(0.99) / MS == pytest.approx(high, rel=0.08)
    assert found.mean_batch == pytest.approx(batch, rel=0.08)


def test_s5_deferred_batches_start_as_late_as_their_deadlines_allow() -> None:
    arrivals = [Arrival(one.at, deadline=one.at + 50 * MS) for one in poisson(450, 5_000)]
    deferred, eager = run(arrivals, "defer"), run(arrivals)
    assert deferred.expired == 0
    assert deferred.quantile(1.0) <= 50 * MS
    assert 20 < deferred.quantile(0.5) / MS < 35
    assert deferred.busy_share < 0.15 < 0.6 < eager.busy_share


def test_s7_two_shapes_at_a_quarter_of_the_load_that_alternation_would_choke_on() -> None:
    arrivals = [Arrival(one.at, kind=number % 2) for number, one in enumerate(poisson(1500, 8_000))]
    assert run(arrivals).quantile(0.99) <= 8 * MS


def test_s7_a_rare_shape_waits_for_two_full_batches_at_most() -> None:
    arrivals = poisson(5500, 10_000)
    rare = 5_000
    arrivals[rare] = Arrival(arrivals[rare].at, kind=1)
    found = run(arrivals, "linger", wait=5 * MS)
    assert found.latencies[rare] <= 5 * MS + 2 * service(0, 32) + service(0, 1)


def ragged(lengths: Sequence[int], rate: float) -> list[Arrival]:
    return [
        Arrival(one.at, dims=((length,),)) for one, length in zip(poisson(rate, len(lengths)), lengths, strict=True)
    ]


def test_s8_buckets_share_an_execution_where_that_is_cheaper_than_two() -> None:
    """Eight lengths at a load that strict lanes hardly bear: a merge with some padding halves the latency."""
    dice = random.Random(3)
    arrivals = ragged([dice.choice([8, 16, 24, 32, 48, 64, 96, 128]) for _ in range(3_000)], 1500)

    def by_length(bucket: int, rows: int) -> float:
        return (2.0 + 0.1 * rows * (0.5 + bucket / 128)) * MS

    known = {64: [(rows, by_length(64, rows)) for rows in (1, 2, 4, 8, 16, 32)]}
    policy = Policy(Bounds(32, WIDE))
    merged = simulate(arrivals, policy, Machine(by_length, known=known, axes=((0, 1),)))
    apart = [Arrival(one.at, kind=one.dims[0][0]) for one in arrivals]
    strict = simulate(apart, policy, Machine(service, known={0: KNOWN[:6]}))
    assert merged.quantile(0.5) < 0.6 * strict.quantile(0.5)
    assert merged.quantile(0.99) < 0.6 * strict.quantile(0.99)


def test_s10_a_patient_request_is_served_under_a_full_load_of_urgent_ones() -> None:
    urgent = [Arrival(one.at, priority=1) for one in poisson(6500, 10_000)]
    patient = 1000
    urgent[patient] = Arrival(urgent[patient].at, priority=3)
    found = simulate(
        urgent, Policy(Bounds(32, WIDE), priority_aging=0.2), Machine(service, known={0: KNOWN[:6]}, queue=10**9)
    )
    assert found.latencies[patient] <= 2 * 0.2 + 0.5


@pytest.mark.parametrize(("rate", "share"), [(6000, 1.0), (7000, 0.95), (9000, 0.9), (12_000, 0.75)])
def test_s11_deadlines_under_overload_do_not_shrink_the_batches(rate: float, share: float) -> None:
    """To save the most urgent request by smaller batches served a quarter of what was possible at 7,000 a second."""
    arrivals = [Arrival(one.at, deadline=one.at + 50 * MS) for one in poisson(rate, 10_000)]
    found = simulate(arrivals, Policy(Bounds(32, WIDE)), Machine(service, known={0: KNOWN[:6]}, queue=256))
    possible = min(len(arrivals), int(32 / service(0, 32) * arrivals[-1].at))
    assert len(found.latencies) >= share * possible
    assert found.quantile(1.0) <= 50.1 * MS
    assert len(found.latencies) + found.expired == len(arrivals)


def test_s24_the_cap_follows_when_the_model_takes_twice_as_long_and_recovers() -> None:
    """Within ten seconds of batches, in both directions; nobody is shed meanwhile."""
    found = batcher(rows=64, target_latency=10 * MS)
    now, caps = 0.0, []
    for factor in (1, 2, 1):
        end = now + 10.0
        while now < end:
            found.add(request(rows=found.caps.rows(0), arrived=now))
            batch = cut(found, now)
            now += factor * service(0, batch.rows)
            found.learned(batch, factor * service(0, batch.rows), now)
        caps.append(found.caps.rows(0))
    assert caps == [pytest.approx(30, abs=2), pytest.approx(5, abs=2), pytest.approx(30, abs=2)]
