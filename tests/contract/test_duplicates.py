"""One outcome per request id (`delivery.deduplicate_ms`), on the in-memory double and on real Kafka."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from forebay.worker import Worker
from tests.contract.sides import KafkaSide, Side, run_to_end
from tests.integration.job import ask, ask_binary, check_answers, check_once, error_code, magic
from tests.kafka_probe import KafkaProbe, Send
from tests.magic import Magic

ONCE: dict[str, Any] = {"delivery.deduplicate_ms": 3_600_000, "batch.max_batch_size": 8}


def passed_over(worker: Worker) -> float:
    worker._observer._refresh(0, worker._outbox)
    metrics = worker._observer._metrics
    return next(s.value for m in metrics.duplicates.collect() for s in m.samples if s.name.endswith("_total"))


def check_committed(side: Side) -> None:
    ends = {(r.topic, r.partition): r.offset + 1 for r in side.read(side.requests)}
    assert ends.items() <= side.committed().items()


def doubled(sends: Iterable[Send]) -> list[Send]:
    """Each of them twice, the second three places behind the first."""
    found = list(sends)
    for place in range(len(found) - 1, -1, -1):
        found.insert(place + 3, found[place])
    return found


@pytest.mark.parametrize("ordering", ["none", "partition", "key"])
def test_a_request_that_is_sent_twice_is_answered_once(side: Side, ordering: str) -> None:
    side.send(doubled(ask(n) if n % 2 else ask_binary(n) for n in range(60)))
    worker = run_to_end(side, {**ONCE, "delivery.ordering": ordering})
    outcomes = side.read(side.results)
    check_once(outcomes, map(str, range(60)))
    check_answers(outcomes)
    check_committed(side)
    assert passed_over(worker) == 60


@pytest.mark.parametrize("ordering", ["none", "partition"])
def test_a_worker_that_starts_knows_the_ids_of_the_window_before_it(side: Side, ordering: str) -> None:
    values = {**ONCE, "delivery.ordering": ordering}
    side.send(ask(n) for n in range(40))
    run_to_end(side, values)
    side.send([*(ask(n) for n in range(0, 40, 2)), *(ask(n) for n in range(40, 50))])
    worker = run_to_end(side, values)
    check_once(side.read(side.results), map(str, range(50)))
    check_committed(side)
    assert passed_over(worker) == 20
    side.send(ask(n) for n in range(50))
    assert passed_over(run_to_end(side, values)) == 50
    check_once(side.read(side.results), map(str, range(50)))
    check_committed(side)


def test_an_error_that_asks_for_another_try_lets_it_through(side: Side) -> None:
    late = ask(1, headers=[("deadline-ms", b"1000")])
    side.send([late, ask(1), ask(1)])
    assert passed_over(run_to_end(side, ONCE)) == 1
    codes = Counter(o.header("error-code") for o in side.read(side.results))
    assert codes == {b"deadline_exceeded": 1, None: 1}
    check_committed(side)


def test_an_error_that_is_final_is_not_repeated(side: Side) -> None:
    side.send(
        [Send(b"{", b"bad"), Send(b"{", b"bad"), magic("raise", Magic.RAISE), magic("raise", Magic.RAISE), ask(1)]
    )
    assert passed_over(run_to_end(side, ONCE)) == 2
    outcomes = side.read(side.results)
    check_once(outcomes, ["bad", "raise", "1"])
    assert {error_code(o) for o in outcomes if o.key != b"1"} == {"invalid_payload", "model_error"}
    assert len(side.read(side.dead)) == 2
    check_committed(side)


def test_without_the_setting_every_record_is_answered(side: Side) -> None:
    side.send([ask(1), ask(1)])
    run_to_end(side, {})
    assert len(side.read(side.results)) == 2


@pytest.fixture
def real(kafka: KafkaProbe) -> Any:
    made = KafkaSide(kafka)
    yield made
    made.close()


def test_the_window_goes_by_the_timestamps_of_the_records(real: KafkaSide) -> None:
    """In the second run, too, where those of the first must be found again, and no more."""
    values = {**ONCE, "delivery.deduplicate_ms": 60_000}
    start = int(time.time() * 1000) - 300_000  # much older ones the broker may delete at any moment
    times = [(1, 0), (1, 60_000), (1, 60_001), (2, 100_000)]
    real.send(replace(ask(n), partition=0, timestamp_ms=start + time) for n, time in times)
    run_to_end(real, values)
    assert Counter(o.key for o in real.read(real.results)) == {b"1": 2, b"2": 1}
    times = [(1, 120_001), (1, 120_002), (2, 160_000), (3, 160_001), (2, 160_002)]
    real.send(replace(ask(n), partition=0, timestamp_ms=start + time) for n, time in times)
    run_to_end(real, values)
    assert Counter(o.key for o in real.read(real.results)) == {b"1": 3, b"2": 2, b"3": 1}
    check_committed(real)


def test_exactly_once_a_request_that_is_sent_again_is_answered_once(real: KafkaSide) -> None:
    values = {**ONCE, "delivery.guarantee": "exactly_once", "delivery.transactional_id": real.requests}
    real.send(doubled(ask(n) for n in range(60)))
    assert passed_over(run_to_end(real, values)) == 60
    real.send(ask(n) for n in range(30, 70))
    assert passed_over(run_to_end(real, values)) == 30
    outcomes = real.read(real.results)
    check_once(outcomes, map(str, range(70)))
    check_answers(outcomes)
    check_committed(real)


def test_what_lies_before_a_new_groups_beginning_is_not_taken_for_answered(real: KafkaSide) -> None:
    """It begins at the end of the topic: nobody has answered what is there."""
    real.send(replace(ask(n), partition=0) for n in range(5))
    worker = real.worker(real.settings({**ONCE, "kafka.auto_offset_reset": "latest"}))
    began = False
    plain = worker._turn

    def turn() -> None:
        nonlocal began
        plain()
        positions = {partition.partition: ledger.position for partition, ledger in worker._offsets}
        if not began and positions.get(0) == 5:
            began = True
            real.send(replace(ask(n), partition=0) for n in range(3))
        if any(ledger.committed == 8 for _, ledger in worker._offsets):
            worker.stop()

    worker._turn = turn  # type: ignore[method-assign]
    worker.run()
    check_once(real.read(real.results), map(str, range(3)))
