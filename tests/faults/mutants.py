"""Mutants: the worker with one thing broken, each of a kind that a change could bring in. The checker must catch them.

Each is a function that patches the worker's classes through pytest's monkeypatch. It says which invariant has to find
it, and in which mode of delivery it lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forebay.custody import Custody
from forebay.records import Partition
from forebay.stream import ahead
from forebay.stream.committer import Committer
from forebay.stream.ledger import Ledger
from forebay.stream.offsets import Offsets
from forebay.stream.order import Sequencer
from forebay.stream.outbox import Outbox
from forebay.stream.results import Encoder
from forebay.stream.transaction import Transaction
from forebay.stream.transactions import TransactionalOutbox
from forebay.worker import Worker
from tests.faults.history import Promise

Patch = Any
"""pytest's MonkeyPatch."""

AT_LEAST_ONCE = Promise()
EXACTLY_ONCE = Promise("exactly_once")
IN_ORDER = Promise(ordering="partition")
IN_ORDER_OF_KEYS = Promise(ordering="key")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken worker; `found_by` is the code of the invariant that must find it."""

    name: str
    breaks: Callable[[Patch], None]
    found_by: str
    promise: Promise

    def __str__(self) -> str:
        return f"{self.name}, {self.promise.guarantee}, order {self.promise.ordering}"


MUTANTS: list[Mutant] = []


def mutant(found_by: str, *promises: Promise) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Put a mutant into the list, once for each promise under which it lives."""

    def add(breaks: Callable[[Patch], None]) -> Callable[[Patch], None]:
        name = breaks.__name__.replace("_", " ")
        MUTANTS.extend(Mutant(name, breaks, found_by, promise) for promise in promises or (AT_LEAST_ONCE,))
        return breaks

    return add


@mutant("V6")
def commits_before_it_produces(patch: Patch) -> None:
    """As a client does that commits what it has polled."""
    take = Custody.take

    def taken(self: Custody, records: Any) -> Any:
        ours = take(self, records)
        self.offsets.closed_all(ours)
        return ours

    patch.setattr(Custody, "take", taken)
    patch.setattr(Offsets, "closed_all", _once_closed(Offsets.closed_all))


def _once_closed(closed_all: Callable[[Offsets, Any], None]) -> Callable[[Offsets, Any], None]:
    seen: set[tuple[int, str, int, int, int]] = set()

    def close(self: Offsets, records: Any) -> None:
        places = {(id(self), one.topic, one.partition, one.epoch, one.offset): one for one in records}
        closed_all(self, [one for place, one in places.items() if place not in seen])
        seen.update(places)

    return close


@mutant("V6")
def commits_one_too_far(patch: Patch) -> None:
    """It takes the offset to read next for the last one that was read."""
    watermark = Ledger.watermark.fget
    assert watermark is not None
    patch.setattr(Ledger, "watermark", property(lambda self: None if watermark(self) is None else watermark(self) + 1))


@mutant("V7")
def commits_one_too_few(patch: Patch) -> None:
    """It commits the last offset that is finished, in place of the next one."""
    watermark = Ledger.watermark.fget
    assert watermark is not None
    patch.setattr(
        Ledger, "watermark", property(lambda self: None if watermark(self) is None else max(watermark(self) - 1, 0))
    )


@mutant("V1")
def takes_a_delivery_error_for_an_acknowledgement(patch: Patch) -> None:
    """The report came, so it is done."""
    delivered, letter = Outbox._delivered, Outbox._dead_letter_delivered
    patch.setattr(
        Outbox, "_delivered", lambda self, outcome, tries, _, message: delivered(self, outcome, tries, None, message)
    )
    patch.setattr(
        Outbox,
        "_dead_letter_delivered",
        lambda self, outcome, again, tries, _, message: letter(self, outcome, again, tries, None, message),
    )


@mutant("V6")
def does_not_wait_for_the_dead_letter(patch: Patch) -> None:
    """The error result is acknowledged, so the request is closed."""

    def delivered(self: Outbox, outcome: Any, again: Any, tries: int, error: Any, message: Any) -> None:
        if error is not None:
            letter(self, outcome, again, tries, error, message)

    letter, send = Outbox._dead_letter_delivered, Outbox.send

    def sent(self: Outbox, outcome: Any, now: float) -> None:
        send(self, outcome, now)
        outcome.pending = 1

    patch.setattr(Outbox, "_dead_letter_delivered", delivered)
    patch.setattr(Outbox, "send", sent)


@mutant("V4", AT_LEAST_ONCE, EXACTLY_ONCE)
def gives_each_request_the_row_of_its_neighbour(patch: Patch) -> None:
    """The classic of batching: the results are right, and go to the wrong callers."""
    results = Encoder.results

    def shifted(self: Encoder, requests: Any, *rest: Any) -> Any:
        return results(self, [*requests[1:], requests[0]], *rest)

    patch.setattr(Encoder, "results", shifted)


@mutant("V1", AT_LEAST_ONCE, EXACTLY_ONCE)
def writes_a_dead_letter_and_no_error_result(patch: Patch) -> None:
    """The operator knows, the caller waits for ever."""

    def produce(self: Outbox, outcome: Any, tries: int = 0) -> None:
        if outcome.failure is None or self._encoder.dead_letter(outcome) is None:
            produced(self, outcome, tries)
        else:
            self._delivered(outcome, tries, None, None)

    produced, queued = Outbox._produce, Transaction._queue

    def queue(self: Transaction, outcome: Any, topic: str, *rest: Any) -> None:
        if topic == self.terms.dead_letter_topic or not self.terms.has_dead_letter(outcome):
            queued(self, outcome, topic, *rest)

    patch.setattr(Outbox, "_produce", produce)
    patch.setattr(Transaction, "_queue", queue)


@mutant("V9", AT_LEAST_ONCE, EXACTLY_ONCE)
def writes_an_error_result_and_no_dead_letter(patch: Patch) -> None:
    """The caller knows, the operator does not."""
    patch.setattr(Encoder, "dead_letter", lambda self, outcome: None)


@mutant("V9")
def writes_dead_letters_without_the_headers_of_their_requests(patch: Patch) -> None:
    """A replay would send another request."""
    letter = Encoder.dead_letter

    def stripped(self: Encoder, outcome: Any) -> Any:
        headers = letter(self, outcome)
        return None if headers is None else headers[len(outcome.record.headers) :]

    patch.setattr(Encoder, "dead_letter", stripped)


@mutant("V2", AT_LEAST_ONCE, EXACTLY_ONCE)
def sends_every_tenth_outcome_twice(patch: Patch) -> None:
    """A retry on top of the client's own."""
    produce, transact = Outbox._produce, Transaction._produce

    def twice(self: Outbox, outcome: Any, tries: int = 0) -> None:
        if outcome.record.offset % 10 == 9:
            outcome.pending += 1
            produce(self, outcome, tries)
        produce(self, outcome, tries)

    def twice_in_transaction(self: Transaction, outcome: Any) -> None:
        for _ in range(2 if outcome.record.offset % 10 == 9 else 1):
            transact(self, outcome)

    patch.setattr(Outbox, "_produce", twice)
    patch.setattr(Transaction, "_produce", twice_in_transaction)


@mutant("V4", AT_LEAST_ONCE, EXACTLY_ONCE)
def keys_an_outcome_by_its_position(patch: Patch) -> None:
    """Nobody who looks for a request's id finds it."""
    _amends_outcomes(patch, lambda outcome: setattr(outcome, "id", outcome.record.source))


@mutant("V3")
def names_the_offset_behind_the_request_as_its_source(patch: Patch) -> None:
    """What tells duplicates apart is wrong."""

    def rename(outcome: Any) -> None:
        record = outcome.record
        wrong = f"{record.topic}/{record.partition}/{record.offset + 100}".encode()
        outcome.headers = [(name, wrong if name == "source" else value) for name, value in outcome.headers]

    _amends_outcomes(patch, rename)


@mutant("V4")
def forgets_to_echo_the_correlation_id(patch: Patch) -> None:
    """A caller that matches by it waits for ever."""

    def strip(outcome: Any) -> None:
        outcome.headers = [pair for pair in outcome.headers if pair[0] != "kafka_correlationId"]

    _amends_outcomes(patch, strip)


def _amends_outcomes(patch: Patch, amend: Callable[[Any], None]) -> None:
    make = Encoder._outcome

    def made(self: Encoder, request: Any, value: bytes, headers: Any) -> Any:
        outcome = make(self, request, value, headers)
        amend(outcome)
        return outcome

    patch.setattr(Encoder, "_outcome", made)


@mutant("V6")
def commits_what_a_revoked_partition_did_not_finish(patch: Patch) -> None:
    """It gives a partition back as read, with requests that nobody will answer."""

    def leave(self: Committer, partitions: Any) -> None:
        given = set(partitions)
        marks = {place: ledger.position for place, ledger in self._offsets if place in given and ledger.position}
        if marks:
            self._consumer.commit(marks)
            self._offsets.requested(marks)

    patch.setattr(Committer, "leave", leave)


@mutant("V1")
def notes_more_as_finished_ahead_than_was(patch: Patch) -> None:
    """What a commit's metadata says is finished, the next owner skips."""
    write = ahead.write

    def filled(base: int, first: int, stamp: int, offsets: Any) -> str:
        return write(base, base + 1, stamp, range(base + 1, max(offsets) + 1))

    patch.setattr(ahead, "write", filled)


@mutant("V6")
def commits_partitions_that_it_has_lost(patch: Patch) -> None:
    """Kafka takes a commit of any member: it may move back what the new owner has committed."""

    def lost(self: Worker, partitions: list[Partition]) -> None:
        self._abandon(set(partitions))
        self._consumer.commits_in_flight = 0
        marks = {place: ledger.watermark or 0 for place, ledger in self._offsets if place in set(partitions)}
        self._custody.forget(set(partitions), self._outbox)
        self._rejoined = marks  # type: ignore[attr-defined]
        self._observer.rebalanced("lost", partitions)

    turn = Worker._turn

    def turned(self: Worker) -> None:
        marks = self.__dict__.pop("_rejoined", None)
        if marks:
            self._consumer.commit(marks)
        turn(self)

    patch.setattr(Worker, "lost", lost)
    patch.setattr(Worker, "_turn", turned)


@mutant("V2")
def answers_for_partitions_that_it_has_given_back(patch: Patch) -> None:
    """It keeps what it had of a revoked partition and answers it all the same."""
    patch.setattr(Worker, "_abandon", lambda self, partitions, keep_overtaken=False, last=True: None)
    patch.setattr(Custody, "release_all", lambda self, outcomes: list(outcomes))
    patch.setattr(Custody, "forget", lambda self, partitions, outbox: self.offsets.forgotten(partitions))
    patch.setattr(Custody, "is_busy_with", lambda self, partitions: False)


@mutant("V1")
def swallows_the_errors_of_a_batch(patch: Patch) -> None:
    """Who fails is forgotten, and its position closed."""
    _delivers(patch, keeps_results=True)


@mutant("V4")
def fails_a_whole_batch_for_one_bad_row(patch: Patch) -> None:
    """The neighbours of a poisoned row pay."""
    _delivers(patch, keeps_results=False)


def _delivers(patch: Patch, *, keeps_results: bool) -> None:
    deliver = Worker._deliver

    def delivered(self: Worker, finished: Any) -> None:
        if finished.failures and keeps_results:
            for request, _ in finished.failures:
                self._custody.offsets.closed(request.record)
                self._custody.give_back(request.record)
            finished.failures.clear()
        elif finished.failures:
            mates = [request for requests, _ in finished.results for request in requests]
            finished.failures.extend((mate, finished.failures[0][1]) for mate in mates)
            finished.results.clear()
        deliver(self, finished)

    patch.setattr(Worker, "_deliver", delivered)


@mutant("V5", IN_ORDER, IN_ORDER_OF_KEYS)
def lets_results_leave_as_they_finish(patch: Patch) -> None:
    """Order was promised."""
    patch.setattr(Sequencer, "release", lambda self, outcome: [outcome])


@mutant("V8", EXACTLY_ONCE)
def leaves_the_offsets_out_of_the_transaction(patch: Patch) -> None:
    """The outcomes are atomic; what was read is not."""

    run = Transaction.run

    class WithoutOffsets:
        """The client of a transaction whose offsets are not sent."""

        def __init__(self, client: Any) -> None:
            self._client = client

        def __getattr__(self, name: str) -> Any:
            return getattr(self._client, name)

        def send_offsets_to_transaction(self, *_: Any) -> None:
            """Leave it out."""

    def without(self: Transaction) -> float:
        self.client = WithoutOffsets(self.client)
        return run(self)

    patch.setattr(Transaction, "run", without)


@mutant("V6", EXACTLY_ONCE)
def commits_offsets_beside_the_transaction_and_early(patch: Patch) -> None:
    """The consumer commits what was sent; the transaction may still be aborted."""
    send = TransactionalOutbox.send

    def sent(self: TransactionalOutbox, outcome: Any, now: float) -> None:
        send(self, outcome, now)
        record = outcome.record
        self._group_metadata().commit({Partition(record.topic, record.partition): record.offset + 1})

    patch.setattr(TransactionalOutbox, "send", sent)


@mutant("V2", EXACTLY_ONCE)
def takes_an_unknown_end_for_a_failure_and_sends_again(patch: Patch) -> None:
    """The transaction that timed out was committed after all."""
    failed = TransactionalOutbox._failed

    def retried(self: TransactionalOutbox, error: Any, now: float) -> None:
        failed(self, error, now)
        self.must_rewind = False

    patch.setattr(TransactionalOutbox, "_failed", retried)


@mutant("V7", EXACTLY_ONCE)
def takes_an_unknown_end_for_a_success(patch: Patch) -> None:
    """The transaction that timed out was lost."""
    run = Transaction.run

    def committed(self: Transaction) -> float:
        try:
            return run(self)
        except Exception as error:
            if error.args[0].name() != "_TIMED_OUT":
                raise
            return time.perf_counter()

    patch.setattr(Transaction, "run", committed)


@mutant("V13", AT_LEAST_ONCE, EXACTLY_ONCE)
def counts_what_it_sends_and_not_what_is_acknowledged(patch: Patch) -> None:
    """The dashboard is fine, whatever happens."""
    deliver = Worker._deliver

    def delivered(self: Worker, finished: Any) -> None:
        deliver(self, finished)
        model = finished.batch.model
        self._observer._metrics.requests.labels(model, "ok").inc(len(finished.results))

    patch.setattr(Worker, "_deliver", delivered)
