"""The rules of micro-batching, each with its numbers, for a model of s(n) = 2.0 + 0.1 n ms on a manual clock.

The names S1 to S24 are those of the specification that the batching room was built from; what concerns the whole
corridor (isolation, commits, ordering) is tested where it happens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from forebay.batching.batcher import Batcher
from forebay.batching.policy import Policy
from forebay.batching.simulation import Machine, simulate
from forebay.batching.sizes import Bounds
from forebay.batching.trace import Arrival, Run
from forebay.records import Batch, Reason
from tests.unit.builders import request

MS = 0.001
WIDE = 1 << 40


def service(bucket: int, rows: int) -> float:
    return (2.0 + 0.1 * rows) * MS


KNOWN = [(rows, service(0, rows)) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]


def batcher(dispatch: Any = "eager", *, rows: int = 32, wait: float = 0.0, **more: Any) -> Batcher:
    cost = {"cost": more.pop("cost"), "cost_unit": "elements"} if "cost" in more else {}
    found = Batcher("model", Policy(Bounds(rows, WIDE, **cost), dispatch, wait, **more))
    found.curve.seed([point for point in KNOWN if point[0] <= rows])
    return found


def cut(found: Batcher, now: float, free_at: float = 0.0, **more: Any) -> Batch:
    batch = found.cut(now, free_at=free_at, **more)
    assert batch is not None
    return batch


def names(batch: Batch) -> list[str]:
    return [one.id for one in batch.requests]


def run(arrivals: Sequence[Arrival], dispatch: Any = "eager", *, rows: int = 32, **more: Any) -> Run:
    policy = Policy(Bounds(rows, WIDE), dispatch, more.pop("wait", 0.0), **more)
    return simulate(arrivals, policy, Machine(service, known={0: KNOWN[:6]}))


# ---------------------------------------------------------------------- S1, S2, S4: bounds and the clock


def test_s1_rows_are_counted_and_a_batch_never_exceeds_its_bound() -> None:
    found = batcher(rows=8)
    for number in range(3):
        found.add(request(str(number), rows=3))
    assert [cut(found, 0.0).rows, cut(found, 0.0).rows] == [6, 3]


def test_s2_lingering_runs_from_the_arrival_of_the_oldest_request() -> None:
    found = batcher("linger", wait=5 * MS)
    for arrived in (0.0, 1 * MS, 4 * MS):
        found.add(request(str(arrived), arrived=arrived))
    assert found.cut(4.9 * MS, free_at=0.0) is None
    assert found.next_due(0.0) == 5 * MS
    assert cut(found, 5 * MS).rows == 3


def test_s2_the_time_that_the_replica_was_busy_counts() -> None:
    found = batcher("linger", wait=5 * MS, lead=0.0)
    found.add(request(arrived=0.0))
    assert found.cut(5 * MS, free_at=7 * MS) is None
    assert found.next_due(7 * MS) == 7 * MS
    assert cut(found, 7 * MS, 7 * MS).reason is Reason.LINGER_EXPIRED


def test_s2_after_idling_a_request_waits_its_whole_linger() -> None:
    found = batcher("linger", wait=5 * MS)
    found.add(request(arrived=100.0))
    assert found.cut(100.0049, free_at=0.0) is None
    assert cut(found, 100.0051).rows == 1


def test_s4_lingering_for_a_backlog_waits_for_no_request_that_does_not_exist() -> None:
    found = batcher("linger", wait=5 * MS, backlog_only=True)
    found.add(request(arrived=0.0))
    assert found.cut(0.0, free_at=0.0, more=True) is None
    assert cut(found, 0.0, more=False).reason is Reason.IDLE


def test_s4_lingering_ends_at_an_allowed_size_when_nothing_more_is_known_to_come() -> None:
    found = batcher("linger", wait=5 * MS, allowed=(4, 8, 32))
    for number in range(4):
        found.add(request(str(number)))
    assert found.cut(0.0, free_at=0.0, more=True) is None
    assert cut(found, 0.0, more=False).reason is Reason.ALLOWED_SIZE


def test_s4_lingering_ends_when_a_deadline_has_no_slack_left() -> None:
    found = batcher("linger", wait=1.0)
    found.add(request("dated", arrived=0.0, deadline=20 * MS))
    found.add(request("other", arrived=0.0))
    latest = 20 * MS - service(0, 3) - found.policy.margin
    due = found.next_due(0.0)
    assert due == pytest.approx(latest)
    assert found.expire(latest) == []
    batch = cut(found, latest + 1e-6)
    assert (batch.rows, batch.reason) == (2, Reason.DEADLINE)


# ---------------------------------------------------------------------- S3, S5: eager and deferred


# ---------------------------------------------------------------------- S6: cost


def test_s6_padded_elements_bound_a_batch() -> None:
    found = batcher(cost=1000)
    for number in range(9):
        found.add(request(str(number), shape=(100,)))
    found.add(request("long", shape=(500,), lane="a"))
    assert len(names(cut(found, 0.0))) == 9
    assert names(cut(found, 0.0)) == ["long"]


def test_s6_what_prepare_says_weighs_in_place_of_the_setting() -> None:
    found = batcher(cost=1000)
    for number in range(4):
        one = request(str(number))
        one.cost = 400.0
        found.add(one)
    assert [len(names(cut(found, 0.0))), len(names(cut(found, 0.0)))] == [2, 2]


# ---------------------------------------------------------------------- S7, S8: lanes


def test_s7_alternating_shapes_run_in_two_executions_and_not_in_sixty_four() -> None:
    found = batcher()
    for number in range(64):
        found.add(request(str(number), lane="ab"[number % 2]))
    assert [cut(found, 0.0).rows, cut(found, 0.0).rows] == [32, 32]
    assert not found.requests


def test_s7_among_heads_of_the_same_age_the_fullest_lane_goes_first() -> None:
    found = batcher()
    found.add(request("lonely", lane="a", arrived=0.0))
    for number in range(5):
        found.add(request(f"b{number}", lane="b", arrived=1 * MS))
    assert len(names(cut(found, 2 * MS))) == 5
    assert names(cut(found, 2 * MS)) == ["lonely"]


def test_ragged_text_is_padded_by_a_fifth_in_place_of_two_thirds() -> None:
    """Log-normal lengths, median 27 tokens, at most 128, a pool of eight batches of 32."""
    dice = random.Random(1)
    lengths = [min(128, max(1, round(math.exp(dice.gauss(math.log(27), 0.8))))) for _ in range(4096)]
    in_order = [lengths[begin : begin + 32] for begin in range(0, len(lengths), 32)]
    assert sum(lengths) / sum(max(batch) * len(batch) for batch in in_order) == pytest.approx(0.31, abs=0.01)

    def by_elements(bucket: int, rows: int) -> float:
        return (2.0 + 0.004 * bucket * rows) * MS

    known = {27: [(rows, by_elements(27, rows)) for rows in (1, 8, 32)]}
    arrivals = [Arrival(0.0, dims=((length,),)) for length in lengths]
    machine = Machine(by_elements, known=known, axes=((0, 1),), queue=256)
    assert simulate(arrivals, Policy(Bounds(32, WIDE)), machine).padding_efficiency >= 0.8


# ---------------------------------------------------------------------- S9: allowed sizes


@pytest.mark.parametrize(
    ("padding", "expected"), [("pad_up", [5]), ("batch_down", [4, 1])], ids=["pad up", "batch down"]
)
def test_s9_five_rows_between_four_and_eight(padding: Any, expected: list[int]) -> None:
    found = batcher(rows=8, allowed=(1, 2, 4, 8), padding=padding)
    for number in range(5):
        found.add(request(str(number), arrived=float(number)))
    sizes = []
    while found.requests:
        sizes.append(cut(found, 9.0, more=False).rows)
    assert sizes == expected


@pytest.mark.parametrize(("more", "rows"), [(False, 18), (True, 16)], ids=["nothing behind", "a busy stream behind"])
def test_s9_the_cheaper_size_counts_the_left_over(more: bool, rows: int) -> None:
    """18 rows: 5.2 ms padded up against 3.6 ms and another execution; 0.225 ms per row against 0.289 in a stream."""
    found = batcher(allowed=(2, 16, 32))
    for number in range(18):
        found.add(request(str(number), arrived=float(number)))
    assert cut(found, 20.0, more=more).rows == rows


# ---------------------------------------------------------------------- S10, S11: priorities and deadlines


def test_s11_a_request_is_rejected_when_it_can_no_longer_be_served_and_not_after_the_batch_before_it() -> None:
    found = batcher()
    found.add(request("dated", arrived=0.0, deadline=10 * MS))
    latest = 10 * MS - service(0, 1)
    assert found.next_due(90.0) == pytest.approx(latest)
    assert found.expire(7 * MS) == []
    assert [one.id for one in found.expire(latest + 0.1 * MS)] == ["dated"]


def test_s11_a_request_that_a_free_replica_can_still_serve_runs() -> None:
    found = batcher()
    found.add(request("dated", arrived=0.0, deadline=10 * MS))
    assert found.expire(7 * MS) == []
    assert names(cut(found, 7 * MS)) == ["dated"]


def test_s11_a_batch_is_no_larger_than_the_deadline_of_its_head_allows() -> None:
    found = batcher()
    found.add(request("head", arrived=0.0, deadline=3 * MS))
    for number in range(31):
        found.add(request(str(number), arrived=0.0, deadline=50 * MS))
    batch = cut(found, 0.0)
    assert batch.requests[0].id == "head"
    assert (batch.rows, batch.reason) == (10, Reason.DEADLINE)
    assert found.requests == 22


@pytest.mark.parametrize("bound", [{"bytes": 1_600}, {"bytes": WIDE, "cost": 400, "cost_unit": "elements"}])
def test_s11_a_batch_chosen_under_overload_keeps_every_bound(bound: dict[str, Any]) -> None:
    """Whom a deadline in a batch made it choose anew was bounded by rows alone: 32 rows ran where 4 were allowed."""
    found = Batcher("model", Policy(Bounds(32, **bound)))
    found.curve.seed(KNOWN[:6])
    for number in range(8):
        found.add(request(f"urgent-{number}", shape=(100,), deadline=2.05 * MS))
    for number in range(64):
        found.add(request(f"other-{number}", shape=(100,), deadline=60 * MS))
    sizes, now, answered = [], 0.0, 0
    while (batch := found.cut(now, free_at=now)) is not None:
        sizes.append(batch.rows)
        now += service(0, batch.rows)
        answered += len(found.expire(now))
    assert max(sizes) == 4
    assert sum(sizes) + answered == 72


def test_s11_who_is_shed_for_others_is_answered_at_once() -> None:
    found = batcher()
    for number in range(8):
        found.add(request(f"urgent-{number}", deadline=2.5 * MS))
    for number in range(64):
        found.add(request(f"other-{number}", deadline=8.4 * MS))
    batch = cut(found, 0.0)
    shed = found.expire(0.0)
    assert batch.reason is Reason.DEADLINE
    assert batch.rows > 5
    assert {one.id.split("-")[0] for one in shed} == {"urgent"}
    assert len(shed) + batch.rows + found.requests == 72
    assert found.next_due(0.0) is not None


def test_s11_who_is_shed_is_given_back_with_its_partition() -> None:
    found = batcher()
    for number in range(8):
        found.add(request(f"urgent-{number}", deadline=2.5 * MS, partition=1))
    for number in range(64):
        found.add(request(f"other-{number}", deadline=8.4 * MS))
    cut(found, 0.0)
    assert len(found.drop(lambda one: one.record.partition == 1)) == 8
    assert found.expire(0.0) == []


# ---------------------------------------------------------------------- S22 to S24


def test_s22_the_next_batch_grows_until_just_before_the_replica_is_free() -> None:
    found = batcher()
    for number in range(3):
        found.add(request(str(number), arrived=0.0))
    free_at = cut(found, 0.0).expected
    found.add(request("a"))
    assert found.cut(0.0, free_at=free_at) is None
    for number in range(12):
        found.add(request(f"later-{number}", arrived=number * 0.15 * MS))
    due = found.next_due(free_at)
    assert due is not None
    assert 0.9 * free_at < due < free_at
    assert found.cut(due - 1e-6, free_at=free_at) is None
    assert cut(found, due, free_at).rows == 13


def test_s22_a_full_batch_is_staged_behind_a_busy_replica_at_once() -> None:
    found = batcher(rows=4)
    for number in range(4):
        found.add(request(str(number)))
    assert cut(found, 0.0, 1.0).rows == 4


def test_s23_two_replicas_share_by_their_speed_and_few_rows_are_not_divided() -> None:
    found = batcher()
    for number in range(4):
        found.add(request(str(number)))
    assert cut(found, 0.0).rows == 4
    assert found.cut(0.0, free_at=0.0) is None


@pytest.mark.parametrize(("target", "rows"), [(10, 30), (20, 80)])
def test_s24_two_service_times_fit_into_the_target(target: float, rows: int) -> None:
    found = batcher(rows=512, target_latency=target * MS)
    assert found.caps.rows(0) == rows


def test_s24_no_batch_grows_beyond_the_knee() -> None:
    found = batcher(rows=512, target_latency=1.0)
    throughput = 512 / service(0, 512)
    rows = found.caps.rows(0)
    assert 0.9 * throughput <= rows / service(0, rows) < 0.93 * throughput


def test_s24_a_queue_that_is_too_long_sheds_nobody_who_can_be_served() -> None:
    """200 rows at once, at most 32 in a batch, 20 ms: the first three batches end in time, so 96 rows are served."""
    arrivals = [Arrival(0.0, deadline=20 * MS) for _ in range(200)]
    found = run(arrivals)
    assert len(found.latencies) >= 96
    assert found.quantile(1.0) <= 20.001 * MS


# ---------------------------------------------------------------------- fairness


def test_a_hot_partition_does_not_hold_back_the_others() -> None:
    found = batcher(rows=8)
    for number in range(100):
        found.add(request(f"hot-{number}", partition=0, arrived=0.0))
    for number in range(4):
        found.add(request(f"calm-{number}", partition=1, arrived=1.0))
    first = names(cut(found, 1.0))
    assert sorted(name for name in first if name.startswith("calm")) == [f"calm-{number}" for number in range(4)]


def test_tenants_share_the_models_time_and_not_the_number_of_requests() -> None:
    found = batcher(rows=8)
    for number in range(200):
        for tenant, rows in ((b"small", 1), (b"large", 4)):
            one = request(f"{tenant.decode()}-{number}", rows=rows)
            one.tenant = tenant
            found.add(one)
    served = {b"small": 0, b"large": 0}
    for _ in range(40):
        for one in cut(found, 0.0).requests:
            assert one.tenant is not None
            served[one.tenant] += one.rows
    assert served[b"small"] == pytest.approx(served[b"large"], rel=0.15)


def test_a_silent_partition_does_not_save_up_for_a_monopoly() -> None:
    found = batcher(rows=8)
    for number in range(400):
        found.add(request(f"busy-{number}", partition=0))
    for _ in range(40):
        cut(found, 0.0)
    for number in range(80):
        found.add(request(f"back-{number}", partition=1))
    back = sum(name.startswith("back") for _ in range(6) for name in names(cut(found, 0.0)))
    assert 20 <= back <= 36
