"""The transactional outbox when the brokers are away for long: it waits for them, and reads again only afterwards."""

from __future__ import annotations

from typing import Any

import confluent_kafka as ck
import pytest

from forebay.errors import KafkaFatalError
from forebay.health import STALLED_AFTER_SECONDS
from forebay.records import Outcome, Partition
from forebay.stream.patience import Patience
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
    assert brokers.begun == 1
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
    assert (brokers.made, brokers.begun, outbox.must_rewind) == (2, 1, False)
    assert "nobody answers" in str(outbox.trouble)

    brokers.away = False
    assert serve(outbox, 1) == []
    assert (brokers.made, brokers.begun, outbox.must_rewind) == (2, 2, True)

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
    with pytest.raises(KafkaFatalError, match="'one' cannot start: nobody answers"):
        outbox.start()
    brokers.away = False
    outbox = outbox_on(brokers)
    brokers.away, brokers.refuse = True, ck.KafkaException(E(E._FATAL, "no right to it", fatal=True))
    outbox.send(result("a"), 0.0)
    with pytest.raises(KafkaFatalError, match="'one' cannot start: no right to it"):
        serve(outbox, 1)


def test_one_whose_transaction_the_coordinator_gave_up_starts_over_and_blames_nobody(brokers: Brokers) -> None:
    """It used to end with a sentence about another worker, when a broker was away for longer than the time-out."""
    outbox = outbox_on(brokers)
    brokers.fence_after = 2.0
    outbox.send(result("a"), 0.0)
    assert serve(outbox, 1) == []
    assert (brokers.made, brokers.begun, outbox.must_rewind) == (2, 2, True)


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
