"""Lanes and the padded size of a batch: bounds hold on what is computed, not on what was sent."""

from __future__ import annotations

from math import prod
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from forebay.batching.flows import Accounts
from forebay.batching.lanes import Lane, Turn
from forebay.batching.sizes import Bounds, Size
from forebay.records import Reason, Request
from tests.unit.builders import request

WIDE = Bounds(rows=1_000, bytes=1 << 30)


def turn(now: float = 0.0, aging: float = 1.0) -> Turn:
    return Turn(now, aging, Accounts())


def lane_of(*requests: Request, ragged: bool = False) -> Lane:
    lane = Lane("a", ragged=ragged)
    for one in requests:
        lane.add(one)
    return lane


def padded_bytes(requests: list[Request]) -> int:
    """What the batch takes in the staging slot: numeric inputs padded to the largest, BYTES as they are."""
    rows, total = sum(one.rows for one in requests), 0
    for index, first in enumerate(requests[0].tensors):
        if isinstance(first, list):
            total += sum(4 + len(part) for one in requests for part in one.tensors[index])  # type: ignore[misc, arg-type]
        else:
            dims = [max(sizes) for sizes in zip(*[one.shapes[index][1:] for one in requests], strict=True)]
            total += rows * prod(dims) * 4
    return total


def test_requests_come_out_in_the_order_of_their_arrival() -> None:
    lane = lane_of(*[request(str(number)) for number in range(5)])
    taken, reason = lane.take(Bounds(rows=3, bytes=1 << 20), turn(0.0, 1.0))
    assert [one.id for one in taken] == ["0", "1", "2"]
    assert reason is Reason.FULL_ROWS
    assert [one.id for one in lane] == ["3", "4"]


def test_a_lane_that_runs_empty_names_no_bound() -> None:
    assert lane_of(request("a"), request("b")).take(WIDE, turn(0.0, 1.0))[1] is None


def test_rows_are_counted_and_not_requests() -> None:
    lane = lane_of(*[request(str(number), rows=3) for number in range(3)])
    bounds = Bounds(rows=8, bytes=1 << 20)
    assert sum(one.rows for one in lane.take(bounds, turn(0.0, 1.0))[0]) == 6
    assert sum(one.rows for one in lane.take(bounds, turn(0.0, 1.0))[0]) == 3


def test_a_request_larger_than_the_row_bound_travels_alone() -> None:
    lane = lane_of(request("big", rows=20), request("small"))
    taken, reason = lane.take(Bounds(rows=8, bytes=1 << 20), turn(0.0, 1.0))
    assert [one.id for one in taken] == ["big"]
    assert reason is Reason.FULL_ROWS


def test_a_larger_request_behind_does_not_join_a_batch_that_it_would_overfill() -> None:
    lane = lane_of(request("small"), request("big", rows=20))
    assert [one.id for one in lane.take(Bounds(rows=8, bytes=1 << 20), turn(0.0, 1.0))[0]] == ["small"]


def test_the_byte_bound_closes_a_batch() -> None:
    lane = lane_of(*[request(str(number), shape=(100,)) for number in range(4)])
    taken, reason = lane.take(Bounds(rows=100, bytes=900), turn(0.0, 1.0))
    assert len(taken) == 2
    assert reason is Reason.FULL_BYTES


def test_padding_counts_against_the_cost_bound() -> None:
    """Nine rows of 100 elements and one of 500: together they would be padded to 5,000."""
    lane = lane_of(*[request(str(n), shape=(100,)) for n in range(9)], request("long", shape=(500,)), ragged=True)
    bounds = Bounds(rows=100, bytes=1 << 20, cost=1_000, cost_unit="elements")
    first, reason = lane.take(bounds, turn(0.0, 1.0))
    assert len(first) == 9
    assert reason is Reason.FULL_COST
    assert [one.id for one in lane.take(bounds, turn(0.0, 1.0))[0]] == ["long"]


def test_padding_counts_against_the_byte_bound() -> None:
    lane = lane_of(request("short", shape=(10,)), request("long", shape=(100,)), ragged=True)
    taken, reason = lane.take(Bounds(rows=100, bytes=500), turn(0.0, 1.0))
    assert [one.id for one in taken] == ["short"]
    assert reason is Reason.FULL_BYTES


def test_the_bytes_of_text_count_against_the_byte_bound_where_priorities_mix() -> None:
    """BYTES inputs counted as nothing as soon as two priorities waited, so a batch could outgrow its staging slot."""
    texts = [request(str(n), tensors=[[bytes(400)]], shapes=[(1,)], priority=1 + n % 2) for n in range(6)]
    taken, reason = lane_of(*texts).take(Bounds(rows=100, bytes=1_000), turn(0.0, 1.0))
    assert len(taken) == 2
    assert reason is Reason.FULL_BYTES


def test_a_more_urgent_request_goes_first_and_order_holds_within_a_level() -> None:
    lane = lane_of(request("a", priority=9), request("b"), request("c", priority=1), request("d"))
    assert [one.id for one in lane.take(WIDE, turn(0.0, 1.0))[0]] == ["c", "b", "d", "a"]


def test_a_request_that_waited_rises_one_level_per_aging_period() -> None:
    old, fresh = request("old", priority=9, arrived=0.0), request("fresh", priority=3, arrived=5.9)
    assert [one.id for one in lane_of(old, fresh).take(WIDE, turn(5.9, 1.0))[0]] == ["fresh", "old"]
    old, fresh = request("old", priority=9, arrived=0.0), request("fresh", priority=3, arrived=6.5)
    assert [one.id for one in lane_of(old, fresh).take(WIDE, turn(6.5, 1.0))[0]] == ["old", "fresh"]


def test_nothing_rises_above_the_first_level() -> None:
    lane = lane_of(request("aged", priority=2, arrived=10.0), request("first", priority=1, arrived=0.0))
    assert [one.id for one in lane.take(WIDE, turn(1_000.0, 1.0))[0]] == ["first", "aged"]


def test_removed_requests_are_gone_and_the_others_keep_their_order() -> None:
    requests = [request(str(number), priority=1 + number % 2) for number in range(6)]
    lane = lane_of(*requests)
    removed = lane.remove({id(requests[0]), id(requests[3])})
    assert {one.id for one in removed} == {"0", "3"}
    assert [one.id for one in lane.take(WIDE, turn(0.0, 1.0))[0]] == ["2", "4", "1", "5"]


def test_the_padded_size_grows_with_the_largest_of_each_dimension() -> None:
    size = Size(request(shape=(2, 5)))
    assert size.grown(request(shape=(3, 1))) == (2, 30, 120)
    size.add(request(shape=(3, 1)))
    assert size.grown(request(rows=2, shape=(1, 1))) == (4, 60, 240)


Unit = Literal["rows", "elements", "bytes"]


@st.composite
def mixed(draw: st.DrawFn) -> Request:
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    text = [bytes(draw(st.integers(0, 30))) for _ in range(rows)]
    return request(
        "r",
        rows=rows,
        priority=draw(st.integers(1, 3)),
        tensors=[bytes(4 * rows * length), text],
        shapes=[(rows, length), (rows,)],
    )


@given(
    requests=st.lists(mixed(), min_size=1, max_size=20),
    rows=st.integers(1, 8),
    size=st.integers(1, 200),
    cost=st.none() | st.integers(1, 60),
    unit=st.sampled_from(["rows", "bytes"]),
)
def test_no_batch_of_several_requests_exceeds_a_bound_and_nothing_is_lost(
    requests: list[Request], rows: int, size: int, cost: int | None, unit: Unit
) -> None:
    lane, out = lane_of(*requests, ragged=True), []
    bounds = Bounds(rows, size, cost, unit)
    while len(lane):
        taken, _ = lane.take(bounds, turn(0.0, 1.0))
        assert taken
        if len(taken) > 1:
            assert sum(one.rows for one in taken) <= rows
            assert padded_bytes(taken) <= size
            if cost is not None:
                assert (sum(one.rows for one in taken) if unit == "rows" else padded_bytes(taken)) <= cost
        out += taken
        assert lane.rows == sum(one.rows for one in lane)
        assert lane.bytes == sum(one.item_bytes for one in lane)
    assert sorted(map(id, out)) == sorted(map(id, requests))
