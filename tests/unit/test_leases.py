"""The ledger of queue mode: waves, verdicts, and what deliveries make of a record."""

from __future__ import annotations

import pytest

from forebay.custody import Custody
from forebay.records import Record
from forebay.settings import Delivery
from forebay.stream.leases import Leased, Leases, Verdict, Wave
from forebay.testing import MemoryBroker, MemoryConsumer


def lent(leases: Leases, *offsets: int, since: float = 0.0, deliveries: int = 1) -> tuple[Wave, list[Record]]:
    """Return a new wave with records at these offsets."""
    wave = leases.begin(since)
    records: list[Record] = []
    for offset in offsets:
        records.append(Leased("t", 0, offset, None, b"v", [], 0, wave.number, deliveries))
        wave.left.add(("t", 0, offset))
    return wave, records


def test_an_answered_record_is_accepted_once_and_the_others_stay_open() -> None:
    leases = Leases(3)
    wave, records = lent(leases, 5, 7, 9)
    assert leases.opened_all(records) == records
    leases.closed_all([records[1]])
    leases.closed(records[1])
    assert wave.told() == [(("t", 0, 7), Verdict.ACCEPT)]
    assert wave.told() == []
    assert wave.left == {("t", 0, 5), ("t", 0, 9)}
    assert [leases.is_open(record) for record in records] == [True, False, True]


def test_a_wave_is_over_when_everything_is_decided_and_told() -> None:
    leases = Leases(3)
    wave, records = lent(leases, 1, 2)
    leases.closed_all(records)
    assert not wave.is_over
    assert leases.oldest() is None
    wave.told()
    assert wave.is_over


def test_what_is_given_back_is_released_and_its_late_outcome_is_dropped() -> None:
    leases = Leases(3)
    wave, records = lent(leases, 1)
    leases.abandoned(records[0])
    leases.closed_all(records)
    assert not leases.holds(records[0])
    assert wave.told() == [(("t", 0, 1), Verdict.RELEASE)]


def test_the_same_record_lent_twice_is_two_loans() -> None:
    """A lock ran out while the record was worked on: the broker lends it again, to this worker too."""
    leases = Leases(3)
    first, [early] = lent(leases, 4, since=1.0)
    second, [late] = lent(leases, 4, since=2.0, deliveries=2)
    assert leases.oldest() == 1.0
    leases.closed_all([late])
    assert (first.told(), second.told()) == ([], [(("t", 0, 4), Verdict.ACCEPT)])
    assert leases.holds(early)


def test_a_record_of_a_wave_that_ended_is_not_opened() -> None:
    leases = Leases(3)
    wave, records = lent(leases, 1)
    leases.end(wave)
    assert leases.opened_all(records) == []
    leases.closed_all(records)
    leases.release(records[0])


@pytest.mark.parametrize(
    ("deliveries", "is_last", "attempts"),
    [(1, False, None), (3, False, None), (4, False, 2), (5, True, 4), (2, True, 3), (1, True, 3)],
)
def test_deliveries_make_a_record_suspect_and_the_last_one_leaves_it_no_run(
    deliveries: int, is_last: bool, attempts: int | None
) -> None:
    leases = Leases(max_attempts=3)
    _, [record] = lent(leases, 6, deliveries=deliveries)
    assert isinstance(record, Leased)
    record.is_last = is_last
    assert leases.opened_all([record]) == [record]
    assert leases.returning == ({} if attempts is None else {("t", 0, 6): attempts})


def test_nothing_is_committed_and_nothing_is_noted_beside_a_commit() -> None:
    leases = Leases(3)
    _, records = lent(leases, 1, 2)
    leases.opened_all(records)
    leases.suspect([(records[0], 1)])
    leases.closed_all(records)
    assert leases.committable(with_news=True) == {}
    assert not leases.has_suspect_news
    assert list(leases) == []


def test_custody_counts_lent_records_in_and_out() -> None:
    leases = Leases(3)
    custody = Custody(Delivery(share_group=True), MemoryConsumer(MemoryBroker({}), []), leases)
    _, records = lent(leases, 1, 2, 3)
    assert custody.take(records) == records
    assert (custody.requests, custody.bytes) == (3, 3)
    leases.release(records[0])
    assert [custody.keeps(record) for record in records] == [False, True, True]
    assert (custody.requests, custody.bytes) == (2, 2)
