"""The batcher: what it cuts, when, and that no request is ever lost, doubled or overtaken within its level."""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forebay.batching.batcher import Batcher
from forebay.batching.policy import Policy
from forebay.batching.sizes import Bounds
from forebay.records import Batch, Reason, Request
from tests.unit.builders import request


def batcher(dispatch: Any = "eager", *, rows: int = 8, size: int = 1 << 20, wait: float = 0.0, **more: Any) -> Batcher:
    return Batcher("model", Policy(Bounds(rows, size, **more), dispatch, wait))


def ids(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [one.id for one in batch.requests]


def filled(found: Batcher, number: int, **options: Any) -> Batcher:
    for index in range(number):
        found.add(request(str(index), **options))
    return found


# ---------------------------------------------------------------------- eager


def test_a_lone_request_leaves_at_once_when_the_replica_is_idle() -> None:
    batch = filled(batcher(), 1).cut(0.0, free_at=0.0)
    assert ids(batch) == ["0"]
    assert batch is not None
    assert batch.reason is Reason.IDLE


def test_a_free_replica_takes_whatever_waits() -> None:
    found = filled(batcher(), 5)
    assert len(ids(found.cut(0.0, free_at=0.0))) == 5
    assert found.cut(0.0, free_at=0.0) is None


def test_nothing_waits_nothing_is_cut() -> None:
    assert batcher().cut(0.0, free_at=0.0) is None


@pytest.mark.parametrize("dispatch", ["eager", "linger", "static"])
def test_ahead_of_a_busy_replica_only_full_batches_are_cut(dispatch: str) -> None:
    found = filled(batcher(dispatch, wait=0.5), 7)
    assert found.cut(100.0, free_at=inf) is None
    found.add(request("last"))
    assert len(ids(found.cut(100.0, free_at=inf))) == 8


def test_what_arrives_while_a_replica_is_busy_joins_the_next_batch() -> None:
    found = filled(batcher(rows=32), 3)
    assert found.cut(0.0, free_at=inf) is None
    for number in range(10):
        found.add(request(f"later-{number}"))
    assert len(ids(found.cut(0.005, free_at=0.0))) == 13


def test_a_full_batch_says_so() -> None:
    batch = filled(batcher(), 9).cut(0.0, free_at=0.0)
    assert batch is not None
    assert (batch.rows, batch.reason) == (8, Reason.FULL_ROWS)


def test_rows_three_three_three_with_a_limit_of_eight_give_batches_of_six_and_three() -> None:
    found = filled(batcher(), 3, rows=3)
    assert [batch.rows for batch in (found.cut(0.0, free_at=0.0), found.cut(0.0, free_at=0.0)) if batch] == [6, 3]


def test_a_request_with_more_rows_than_a_batch_travels_alone() -> None:
    found = batcher()
    for name, rows in (("small", 1), ("large", 20), ("next", 1)):
        found.add(request(name, rows=rows))
    assert ids(found.cut(0.0, free_at=0.0)) == ["small"]
    assert ids(found.cut(0.0, free_at=0.0)) == ["large"]
    assert ids(found.cut(0.0, free_at=0.0)) == ["next"]


def test_batch_numbers_never_repeat_even_over_several_models() -> None:
    numbers = count(1)
    policy = Policy(Bounds(1, 1 << 20))
    found = [filled(Batcher(name, policy, numbers), 3) for name in ("a", "b")]
    batches = [one.cut(0.0, free_at=0.0) for one in found * 3]
    assert len({batch.number for batch in batches if batch}) == 6


# ---------------------------------------------------------------------- linger


def test_lingering_counts_from_the_arrival_of_the_oldest_request() -> None:
    found = batcher("linger", wait=0.5)
    for arrived in (0.0, 0.125, 0.375):
        found.add(request(str(arrived), arrived=arrived))
    assert found.next_due(0.0) == 0.5
    assert found.cut(0.4375, free_at=0.0) is None
    batch = found.cut(0.5, free_at=0.0)
    assert len(ids(batch)) == 3
    assert batch is not None
    assert batch.reason is Reason.LINGER_EXPIRED


def test_the_time_that_the_replica_was_busy_counts_as_waiting() -> None:
    found = batcher("linger", wait=0.5)
    found.add(request(arrived=0.0))
    assert found.cut(0.75, free_at=inf) is None
    assert found.cut(0.75, free_at=0.0) is not None


def test_after_idling_a_request_waits_its_whole_linger() -> None:
    found = batcher("linger", wait=0.5)
    found.add(request(arrived=100.0))
    assert found.cut(100.0, free_at=0.0) is None
    assert found.next_due(0.0) == 100.5
    assert found.cut(100.5, free_at=0.0) is not None


@pytest.mark.parametrize(("bound", "reason"), [("rows", Reason.FULL_ROWS), ("size", Reason.FULL_BYTES)])
def test_lingering_ends_as_soon_as_a_batch_is_full(bound: str, reason: Reason) -> None:
    found = filled(batcher("linger", wait=10.0, **{bound: {"rows": 4, "size": 16}[bound]}), 5)
    batch = found.cut(0.0, free_at=0.0)
    assert batch is not None
    assert (len(batch.requests), batch.reason) == (4, reason)


@pytest.mark.parametrize("unit", ["rows", "elements", "bytes"])
@pytest.mark.parametrize("dispatch", ["linger", "static"])
def test_a_batch_that_is_full_by_cost_waits_no_longer(dispatch: str, unit: str) -> None:
    """A lane was full by rows or bytes only: with a bound on cost, static and linger waited on for nothing."""
    cost = {"rows": 4, "elements": 4, "bytes": 16}[unit]
    found = filled(batcher(dispatch, rows=100, wait=10.0, cost=cost, cost_unit=unit), 5)
    batch = found.cut(0.0, free_at=0.0)
    assert batch is not None
    assert (len(batch.requests), batch.reason) == (4, Reason.FULL_COST)
    assert found.cut(0.0, free_at=0.0) is None


def test_a_drain_waits_for_nobody() -> None:
    for dispatch in ("linger", "static"):
        found = filled(batcher(dispatch, wait=10.0), 3)
        assert found.cut(0.0, free_at=0.0) is None
        batch = found.cut(0.0, free_at=0.0, draining=True)
        assert batch is not None
        assert (len(batch.requests), batch.reason) == (3, Reason.DRAIN)


def test_an_overdue_lane_is_not_held_back_by_a_young_one_with_more_urgent_requests() -> None:
    found = batcher("linger", wait=0.5)
    found.add(request("old", lane="a", arrived=0.0))
    found.add(request("young", lane="b", arrived=0.4375, priority=1))
    assert ids(found.cut(0.5, free_at=0.0)) == ["old"]
    assert found.next_due(0.0) == 0.9375


# ---------------------------------------------------------------------- static


def test_static_runs_full_batches_only() -> None:
    found = filled(batcher("static"), 7)
    assert found.cut(1e9, free_at=0.0) is None
    found.add(request("eighth"))
    assert len(ids(found.cut(1e9, free_at=0.0))) == 8


# ---------------------------------------------------------------------- lanes and priorities


def test_alternating_shapes_fill_two_batches_and_not_sixty_four() -> None:
    found = batcher(rows=32)
    for number in range(64):
        found.add(request(str(number), lane="ab"[number % 2]))
    sizes = []
    while (batch := found.cut(0.0, free_at=0.0)) is not None:
        assert len({one.lane for one in batch.requests}) == 1
        sizes.append(batch.rows)
    assert sizes == [32, 32]


def test_the_lane_with_the_oldest_head_is_cut_first() -> None:
    found = batcher()
    found.add(request("younger", lane="a", arrived=2.0))
    found.add(request("oldest", lane="b", arrived=1.0))
    for number in range(6):
        found.add(request(f"a{number}", lane="a", arrived=3.0))
    assert ids(found.cut(3.0, free_at=0.0)) == ["oldest"]


def test_a_rare_shape_is_served_before_younger_requests_of_a_busy_shape() -> None:
    found = batcher(rows=4)
    filled(found, 4, lane="busy", arrived=0.0)
    found.add(request("rare", lane="rare", arrived=0.25))
    filled(found, 400, lane="busy", arrived=0.5)
    assert ids(found.cut(1.0, free_at=0.0)) == ["0", "1", "2", "3"]
    assert ids(found.cut(1.0, free_at=0.0)) == ["rare"]


def test_a_lane_with_a_more_urgent_head_goes_before_an_older_one() -> None:
    found = batcher()
    found.add(request("older", lane="a", arrived=0.0))
    found.add(request("urgent", lane="b", arrived=0.5, priority=1))
    assert ids(found.cut(0.5, free_at=0.0)) == ["urgent"]


def test_aging_lets_no_lane_starve_under_a_stream_of_urgent_requests() -> None:
    found = batcher(rows=1)
    found.add(request("patient", lane="a", arrived=0.0, priority=9))
    served_at = None
    for turn in range(20):
        now = turn * 0.5
        found.add(request(f"urgent-{turn}", lane="b", arrived=now, priority=1))
        if ids(found.cut(now, free_at=0.0)) == ["patient"]:
            served_at = now
            break
    assert served_at == 8.0  # eight periods of one second lift level 9 to level 1


# ---------------------------------------------------------------------- deadlines and dropping


def test_expired_requests_are_handed_out_once_and_never_run() -> None:
    found = batcher()
    found.add(request("late", deadline=1.0))
    found.add(request("lives", deadline=2.0))
    found.add(request("timeless"))
    assert found.next_due(None) == 1.0
    assert found.expire(0.9) == []
    assert [one.id for one in found.expire(1.0)] == ["late"]
    assert found.expire(1.5) == []
    assert found.next_due(None) == 2.0
    assert ids(found.cut(1.5, free_at=0.0)) == ["lives", "timeless"]


def test_a_request_that_was_cut_expires_no_more() -> None:
    found = batcher()
    found.add(request("cut", deadline=1.0))
    found.cut(0.0, free_at=0.0)
    found.add(request("waits", deadline=5.0))
    assert found.expire(2.0) == []
    assert [one.id for one in found.expire(5.0)] == ["waits"]
    assert found.next_due(0.0) is None


def test_the_next_due_time_is_the_earlier_of_linger_and_deadline() -> None:
    found = batcher("linger", wait=0.5)
    found.add(request("a", arrived=0.0, deadline=0.25))
    margin = found.policy.margin
    assert found.next_due(0.0) == 0.25 - margin
    assert found.next_due(None) == 0.25
    found.expire(0.25)
    assert found.next_due(0.0) is None


def test_an_eager_batcher_is_due_when_its_replica_is_free() -> None:
    found = filled(batcher(), 3)
    assert found.next_due(7.0) == 7.0
    assert found.next_due(None) is None


def test_dropped_requests_come_back_to_the_caller_and_the_others_stay() -> None:
    found = batcher()
    for number in range(6):
        found.add(request(str(number), lane=number % 3, partition=number % 2, deadline=9.0))
    gone = found.drop(lambda one: one.record.partition == 1)
    assert sorted(one.id for one in gone) == ["1", "3", "5"]
    assert (found.requests, found.bytes) == (3, 12)
    assert sorted(one.id for one in found.expire(9.0)) == ["0", "2", "4"]
    assert (found.requests, found.bytes, found.next_due(0.0)) == (0, 0, None)


# ---------------------------------------------------------------------- properties


class Traffic(RuleBasedStateMachine):
    """Requests come, are cut, expire and are dropped in any order; a plain list says what must be inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds = Bounds(rows=4, bytes=60)
        self.found = Batcher("model", Policy(self.bounds, "linger", 2.0, priority_aging=3.0))
        self.now = 0.0
        self.inside: list[Request] = []
        self.number = count()

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        lane=st.sampled_from("ab"),
        rows=st.integers(1, 6),
        priority=st.integers(1, 9),
        patience=st.none() | st.sampled_from([0.5, 2.0, 8.0]),
    )
    def add(self, lane: str, rows: int, priority: int, patience: float | None) -> None:
        deadline = None if patience is None else self.now + patience
        made = request(
            str(next(self.number)), rows=rows, lane=lane, arrived=self.now, priority=priority, deadline=deadline
        )
        self.inside.append(made)
        self.found.add(made)

    @rule(idle=st.booleans(), draining=st.booleans())
    def cut(self, idle: bool, draining: bool) -> None:
        self.expire()  # as the corridor does: before, for those that are late, and after, for whom a cut gave up
        batch = self.found.cut(self.now, free_at=0.0 if idle else inf, draining=draining)
        if batch is None:
            if idle and self.inside:
                assert not draining
                assert all(self.now - one.arrived < 2.0 for one in self.inside), "the linger bound is broken"
            return
        assert batch.requests
        assert batch.rows == sum(one.rows for one in batch.requests)
        assert len({one.lane for one in batch.requests}) == 1
        if len(batch.requests) > 1:
            assert batch.rows <= self.bounds.rows
            assert sum(one.item_bytes for one in batch.requests) <= self.bounds.bytes
        self._in_order(batch.requests)
        self._leave(batch.requests)
        self.expire()

    def _in_order(self, taken: list[Request]) -> None:
        """Whoever leaves is the oldest of its lane and level."""
        waiting: dict[Any, list[str]] = defaultdict(list)
        for one in self.inside:
            waiting[one.lane, one.priority].append(one.id)
        left: dict[Any, list[str]] = defaultdict(list)
        for one in taken:
            left[one.lane, one.priority].append(one.id)
        for queue, names in left.items():
            assert waiting[queue][: len(names)] == names

    def _leave(self, gone: list[Request]) -> None:
        for one in gone:
            position = next(index for index, inside in enumerate(self.inside) if inside is one)
            del self.inside[position]

    @rule()
    def expire(self) -> None:
        late = self.found.expire(self.now)
        self._leave(late)
        assert all(one.deadline is not None and one.deadline <= self.now for one in late)
        assert all(one.deadline is None or one.deadline > self.now for one in self.inside)

    @rule(lane=st.sampled_from("ab"), priority=st.integers(1, 9))
    def drop(self, lane: str, priority: int) -> None:
        gone = self.found.drop(lambda one: one.lane == lane and one.priority >= priority)
        self._leave(gone)
        assert not [one for one in self.inside if one.lane == lane and one.priority >= priority]

    @invariant()
    def counters_match(self) -> None:
        assert self.found.requests == len(self.inside)
        assert self.found.bytes == sum(one.item_bytes for one in self.inside)

    @invariant()
    def a_due_time_is_never_missed(self) -> None:
        due = self.found.next_due(0.0)
        expected = [one.arrived + 2.0 for one in self.inside]
        expected += [one.deadline for one in self.inside if one.deadline is not None]
        if expected:
            assert due is not None
            assert due <= min(expected)


TestTraffic = Traffic.TestCase


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=40))
def test_draining_gives_every_request_back_exactly_once(arrivals: list[tuple[str, int]]) -> None:
    found = batcher(rows=4)
    for number, (lane, priority) in enumerate(arrivals):
        found.add(request(str(number), lane=lane, priority=priority, arrived=number / 10))
    out: list[str] = []
    while (batch := found.cut(99.0, free_at=0.0, draining=True)) is not None:
        out += ids(batch)
    assert sorted(out, key=int) == [str(number) for number in range(len(arrivals))]
