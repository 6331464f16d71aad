"""While brokers are silent outcomes wait where they can be dropped, and one topic that is silent holds up no other."""

from __future__ import annotations

from itertools import pairwise

from forebay.records import Outcome, Partition
from forebay.stream.holdback import FREE, QUIET_SECONDS, SILENT_SECONDS
from tests.unit.test_outbox import Scene, result

MANY = FREE + 40


def scene_of_silence() -> tuple[Scene, list[Outcome]]:
    """Return an outbox whose client has as much as it may, and hears nothing."""
    scene = Scene()
    scene.producer.hold_reports = True
    scene.serve()
    given = [result(str(number)) for number in range(MANY)]
    scene.send(*given)
    scene.serve()
    scene.serve(QUIET_SECONDS * 1.01)
    return scene, given


def test_what_comes_while_many_are_under_way_and_nothing_is_heard_waits() -> None:
    scene, given = scene_of_silence()
    later = [result(f"later-{number}") for number in range(300)]
    scene.send(*later)
    assert scene.producer.calls == len(given)
    assert scene.outbox.unacknowledged == len(given) + len(later)


def test_it_leaves_in_its_order_when_the_brokers_are_heard_again() -> None:
    scene, given = scene_of_silence()
    later = [result(f"later-{number}") for number in range(700)]
    scene.send(*later)
    scene.producer.hold_reports = False
    scene.serve(0.01)
    newest = result("newest")
    scene.send(newest)
    closed = scene.serve_until_closed()
    assert [outcome.id for outcome in closed] == [outcome.id for outcome in (*given, *later, newest)]


def test_few_under_way_wait_for_nothing_however_late_their_acknowledgement_is() -> None:
    scene = Scene()
    scene.producer.hold_reports = True
    for number in range(FREE):
        scene.send(result(str(number)))
        scene.serve(10 * QUIET_SECONDS)
    assert scene.producer.calls == FREE


def test_now_and_then_one_goes_out_so_that_a_single_silent_topic_holds_up_no_other() -> None:
    scene, given = scene_of_silence()
    scene.send(*(result(f"later-{number}") for number in range(100)))
    calls = []
    for _ in range(400):
        scene.serve(0.01)
        calls.append(scene.producer.calls)
    assert len(given) < calls[-1] <= len(given) + 10
    assert all(after - before <= 1 for before, after in pairwise(calls))


def test_what_waits_of_lost_partitions_is_dropped_and_never_sent() -> None:
    scene, given = scene_of_silence()
    later = [result(f"later-{number}") for number in range(100)]
    scene.send(*later)
    record = later[0].record
    assert scene.outbox.forget([Partition("elsewhere", 0)]) == []
    assert scene.outbox.forget([Partition(record.topic, record.partition)]) == later
    assert scene.outbox.unacknowledged == len(given)
    scene.producer.hold_reports = False
    assert len(scene.serve_until_closed()) == len(given)
    assert scene.producer.calls == len(given)


def test_a_long_silence_is_named_and_its_end_too() -> None:
    scene, _ = scene_of_silence()
    assert scene.outbox.trouble is None
    scene.serve(SILENT_SECONDS)
    assert "acknowledged nothing" in str(scene.outbox.trouble)
    scene.producer.hold_reports = False
    scene.serve(0.01)
    assert scene.outbox.trouble is None
