"""The transactional outbox when the brokers are away for long: it waits for them, and reads again only afterwards."""

from __future__ import annotations

from typing import Any

import confluent_kafka as ck
import pytest

from forebay.errors import ConfigError, KafkaFatalError, KafkaUnavailableError
from forebay.health import STALLED_AFTER_SECONDS
from forebay.records import Outcome, Partition
from forebay.stream.patience import Patience
from forebay.stream.transaction import Portion
from forebay.stream.transactions import TransactionalOutbox
from tests.unit.test_outbox import ENCODER, result

E = ck.KafkaError
CONFIG = {"transactional.id": "one", "transaction.timeout.ms": 1000}


def timed_out() -> ck.KafkaException:
    return ck.KafkaException(E(E._TIMED_OUT, "nobody answers", retriable=True))


class Brokers:
    """What producers on them meet: `away` makes every call time out; `refuse` is what the start meets."""

    def __init__(self) -> None:
        self.away = False
        self.refuse: ck.KafkaException | None = None
        self.made = 0
        self.begun = 0
        self.fence_after: float | None = None
        self.most: int | None = None
        self.clock = 1000.0
        self.committed: list[bytes] = []

    def producer(self, config: dict[str, Any], **_: Any) -> Brokers.Producer:
        self.made += 1
        return Brokers.Producer(self)

    class Producer:
        """The calls of a transactional producer."""

        def __init__(self, brokers: Brokers) -> None:
            self._brokers = brokers
            self._open: list[bytes] = []

        def _ask(self) -> None:
            if self._brokers.away:
                raise timed_out()

        def init_transactions(self, timeout: float) -> None:
            if self._brokers.refuse is not None:
                raise self._brokers.refuse
            self._ask()
            self._brokers.begun += 1

        def begin_transaction(self) -> None:
            self._open = []

        def produce(self, topic: str, value: bytes, key: bytes, *_: Any, **__: Any) -> None:
            self._open.append(key)

        def send_offsets_to_transaction(self, *_: Any) -> None:
            self._ask()

        def commit_transaction(self, timeout: float) -> None:
            self._ask()
            if self._brokers.most is not None and len(self._open) > self._brokers.most:
                self._brokers.clock += timeout
                raise timed_out()
            if self._brokers.fence_after is not None:
                self._brokers.clock += self._brokers.fence_after
                self._brokers.fence_after = None
                raise ck.KafkaException(E(E._FENCED, "fenced by a newer instance", fatal=True))
            self._brokers.committed += self._open

        def poll(self, timeout: float) -> int:
            return 0


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Brokers:
    brokers = Brokers()
    monkeypatch.setattr(ck, "Producer", brokers.producer)
    monkeypatch.setattr("forebay.stream.transactions.time.perf_counter", lambda: brokers.clock)
    return brokers


def outbox_on(brokers: Brokers) -> TransactionalOutbox:
    outbox = TransactionalOutbox(dict(CONFIG), ENCODER, "dead", lambda: None)
    outbox.start()
    assert brokers.begun == 2  # they take turns
    return outbox


def serve(outbox: TransactionalOutbox, times: int) -> list[Outcome]:
    """Serve it that often, each time until the transaction that is under way has ended."""
    closed: list[Outcome] = []
    for turn in range(times):
        closed += outbox.serve(100.0 * turn)
        while outbox._ending:
            outbox._end(100.0 * turn, 1.0)
    return closed + outbox.serve(0.0)


def test_an_outage_is_waited_out_with_one_new_producer_and_then_the_positions_go_back(brokers: Brokers) -> None:
    """It used to end the worker when the new producer had not begun after 30 seconds."""
    outbox = outbox_on(brokers)
    brokers.away = True
    outbox.send(result("a"), 0.0)
    assert serve(outbox, 20) == []
    assert (brokers.made, brokers.begun, outbox.must_rewind) == (3, 2, False)
    assert "nobody answers" in str(outbox.trouble)

    brokers.away = False
    assert serve(outbox, 1) == []
    assert (brokers.made, brokers.begun, outbox.must_rewind) == (3, 3, True)

    outbox.forget([Partition("requests", 0)])
    outbox.must_rewind = False
    assert serve(outbox, 1) == []
    assert outbox.trouble is None


def test_nothing_is_sent_until_the_positions_are_those_that_are_committed(brokers: Brokers) -> None:
    outbox = outbox_on(brokers)
    brokers.away = True
    outbox.send(result("a"), 0.0)
    serve(outbox, 3)
    brokers.away = False
    assert serve(outbox, 5) == []
    assert brokers.committed == []
    assert not outbox.is_ready

    outbox.forget([Partition("requests", 0)])
    outbox.must_rewind = False
    outbox.send(result("b"), 0.0)
    assert [outcome.id for outcome in serve(outbox, 2)] == ["b"]
    assert brokers.committed == [b"b"]


def test_a_start_that_nobody_answers_or_that_is_refused_ends_it_with_a_sentence(brokers: Brokers) -> None:
    outbox = TransactionalOutbox(dict(CONFIG), ENCODER, "dead", lambda: None)
    brokers.away = True
    with pytest.raises(KafkaUnavailableError, match="'one' cannot start: nobody answers"):
        outbox.start()
    brokers.away = False
    outbox = outbox_on(brokers)
    brokers.away, brokers.refuse = True, ck.KafkaException(E(E._FATAL, "no right to it", fatal=True))
    outbox.send(result("a"), 0.0)
    with pytest.raises(KafkaFatalError, match="'one' cannot start: no right to it"):
        serve(outbox, 1)


def forbidden() -> ck.KafkaException:
    return ck.KafkaException(E(E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "not authorized.", fatal=True))


def test_a_start_without_the_right_to_its_id_is_a_wrong_configuration_and_names_the_mend(brokers: Brokers) -> None:
    """It used to be an internal error."""
    outbox = TransactionalOutbox(dict(CONFIG), ENCODER, "dead", lambda: None)
    brokers.refuse = forbidden()
    with pytest.raises(ConfigError, match=r"'one' cannot start: not authorized; grant Write .* forebay acls"):
        outbox.start()


def test_a_lost_right_to_the_id_is_waited_for_with_new_producers_and_growing_pauses(brokers: Brokers) -> None:
    """It used to end the worker."""
    outbox = outbox_on(brokers)
    brokers.away, brokers.refuse = True, forbidden()
    outbox.send(result("a"), 0.0)
    tries = []
    for turn in range(300):
        outbox.serve(turn * 0.1)
        while outbox._ending:
            outbox._end(turn * 0.1, 1.0)
        tries.append(brokers.made)
    assert "grant Write" in str(outbox.trouble)
    assert 8 < tries[-1] < 20
    assert tries[-1] - tries[-101] <= 3
    brokers.away, brokers.refuse = False, None
    assert outbox.serve(100.0) == []
    assert (brokers.begun, outbox.must_rewind) == (3, True)
    outbox.forget([Partition("requests", 0)])
    outbox.must_rewind = False
    outbox.serve(101.0)
    assert outbox.trouble is None


def test_one_whose_transaction_the_coordinator_gave_up_starts_over_and_blames_nobody(brokers: Brokers) -> None:
    """It used to end with a sentence about another worker, when a broker was away for longer than the time-out."""
    outbox = outbox_on(brokers)
    brokers.fence_after = 2.0
    outbox.send(result("a"), 0.0)
    assert serve(outbox, 1) == []
    assert (brokers.made, brokers.begun, outbox.must_rewind) == (3, 3, True)


def test_what_does_not_get_through_in_time_is_tried_again_with_fewer_outcomes_until_it_does(brokers: Brokers) -> None:
    """A quota, or a slow link: it used to be tried again as large as before, for ever, and the worker called ready."""
    outbox = outbox_on(brokers)
    brokers.most = 70
    tries = 0
    while not brokers.committed:
        tries += 1
        assert tries < 10
        for number in range(2_000):
            outbox.send(result(str(number)), 0.0)
        outbox.serve(100.0 * tries)
        while outbox._ending:
            outbox._end(100.0 * tries, 1.0)
        if outbox.must_rewind:
            assert "it had" in str(outbox.trouble)
            assert "a slow link or a quota" in str(outbox.trouble)
            outbox.forget([Partition("requests", 0)])
            outbox.must_rewind = False
    assert [len(brokers.committed), tries] == [31, 4]


def test_a_worker_whose_last_transaction_was_too_slow_is_not_ready_until_one_succeeds(brokers: Brokers) -> None:
    outbox = outbox_on(brokers)
    brokers.most = 1
    for name in "abc":
        outbox.send(result(name), 0.0)
    serve(outbox, 1)
    outbox.forget([Partition("requests", 0)])
    outbox.must_rewind = False
    outbox.serve(0.5)
    assert outbox.trouble is not None
    outbox.send(result("a"), 1.0)
    while not outbox.serve(1.0, 0.01):
        pass
    assert outbox.trouble is None


def test_transactions_grow_again_after_they_had_to_shrink() -> None:
    portion = Portion(10.0)
    portion.overdue(2_000)
    assert portion.outcomes == 500
    sizes = []
    for _ in range(200):
        portion.ended(0.1)
        sizes.append(portion.outcomes)
    assert sizes[0] == 1_000
    assert sizes[1] < 1_200
    assert sizes[-1] == 10_000
    portion.ended(9.0)
    assert portion.outcomes == 10_000
    for _ in range(20):
        portion.overdue(portion.outcomes)
    assert portion.outcomes == 1


def test_one_that_is_fenced_at_once_ends_with_a_sentence_about_the_other(brokers: Brokers) -> None:
    outbox = outbox_on(brokers)
    brokers.fence_after = 0.1
    outbox.send(result("a"), 0.0)
    with pytest.raises(KafkaFatalError, match="another worker uses the transactional id 'one'"):
        serve(outbox, 1)


def test_the_loop_waits_for_offsets_alone_only_as_long_as_it_may_be_silent(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to wait two and a half times the time-out of a transaction, longer than /livez allows."""
    waits: list[float] = []
    monkeypatch.setattr(Patience, "call", lambda self, call, seconds: waits.append(seconds))
    outbox = TransactionalOutbox({**CONFIG, "transaction.timeout.ms": 600_000}, ENCODER, "dead", lambda: None)
    outbox.start()
    outbox.commit({Partition("requests", 0): 7}, {})
    assert len(waits) == 1
    assert waits[0] < STALLED_AFTER_SECONDS / 2
