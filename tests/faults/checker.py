"""The checker: whether a run kept what Forebay promises, from what it left behind and nothing else.

Pure: no Kafka client, no clock, no code of the worker. Sixteen invariants, V1 to V16, each a function that yields its
evidence. `check` returns what is broken; `verify` fails a test with it. The names are those of the anomalies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from tests.faults.history import (
    Fate,
    Fault,
    History,
    Logged,
    Place,
    Position,
    View,
    coordinates_of,
    has_letter,
    ids_of,
    is_error,
    place_name,
    source_of,
)

SHOWN = 8
ECHOED = frozenset({"kafka_correlationId", "correlation_id", "traceparent", "tracestate", "baggage"})
VOLATILE = frozenset({"batch-size"})
"""Headers that may differ between two outcomes of one request: they tell of the run, not of the answer."""

RETRIABLE = frozenset({b"deadline_exceeded", b"resource_exhausted", b"internal"})
"""Error codes after which the request may be sent again under its id."""

MOODS = frozenset({b"deadline_exceeded", b"resource_exhausted", b"poisoned", b"internal"})
"""Error codes that another run of the same request need not have: they tell of the time and the machine."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken invariant, with everything that shows it."""

    code: str
    name: str
    rule: str
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.evidence) - SHOWN} more" if len(self.evidence) > SHOWN else ""
        return f"{self.code} {self.name}: {self.rule}; but {'; '.join(self.evidence[:SHOWN])}{more}"


@dataclass(frozen=True, slots=True)
class Invariant:
    """One thing that every run must keep."""

    code: str
    name: str
    rule: str
    look: Callable[[View], Iterable[str]]


INVARIANTS: list[Invariant] = []
Look = Callable[[View], Iterable[str]]


def invariant(code: str, name: str, rule: str) -> Callable[[Look], Look]:
    """Put a function into the list."""

    def add(look: Look) -> Look:
        INVARIANTS.append(Invariant(code, name, rule, look))
        return look

    return add


def check(history: History) -> list[Finding]:
    """Return every invariant that the run broke."""
    view = View(history)
    found = [(one, tuple(one.look(view))) for one in INVARIANTS]
    return [Finding(one.code, one.name, one.rule, evidence) for one, evidence in found if evidence]


def verify(history: History) -> None:
    """Fail with every finding, a line each."""
    found = check(history)
    assert not found, "\n".join(map(str, found))


@invariant("V1", "lost", "every request that is committed, and at the end every request, has an outcome")
def lost(view: View) -> Iterator[str]:
    """A dead letter is no outcome: the caller waits for a result or an error."""
    for request in view.must_be_answered():
        if request.position not in view.outcomes_of:
            mark = view.history.committed.get(request.place)
            yield f"{_named(request)} has no outcome (committed is {mark})"


@invariant("V2", "duplicate", "no request has more outcomes than faults explain, and those of one request are equal")
def duplicate(view: View) -> Iterator[str]:
    """Exactly once: one. At least once: one more for each fault at which it was not committed yet."""
    for position, outcomes in view.outcomes_of.items():
        if len(outcomes) > 1:
            allowed = 1 if view.exactly_once else 1 + _faults_that_cover(position, view.history.faults)
            if len(outcomes) > allowed:
                where = ", ".join(place_name(outcome.position) for outcome in outcomes)
                yield f"{place_name(position)} has {len(outcomes)} outcomes, {allowed} may be, at {where}"
            yield from _unequal(position, outcomes)


def _faults_that_cover(position: Position, faults: Iterable[Fault]) -> int:
    return sum(fault.covers(position) for fault in faults)


def _unequal(position: Position, outcomes: list[Logged]) -> Iterator[str]:
    steady = [outcome for outcome in outcomes if outcome.header("error-code") not in MOODS]
    for other in steady[1:]:
        if _content(other) != _content(steady[0]):
            yield f"the outcomes of {place_name(position)} differ: {_short(steady[0])} and {_short(other)}"


def _content(outcome: Logged) -> tuple[object, ...]:
    headers = [pair for pair in outcome.headers if pair[0] not in VOLATILE]
    return outcome.key, outcome.value, sorted(headers, key=repr)


@invariant("V3", "phantom", "every outcome and every dead letter is of a request that was really sent")
def phantom(view: View) -> Iterator[str]:
    """A request that its producer aborted, or knows to have failed, was not sent."""
    seen = [(outcome, source_of(outcome)) for outcome in view.visible]
    seen += [(letter, coordinates_of(letter)) for letter in view.history.letters if view.sees(letter)]
    for record, source in seen:
        request = view.requests.get(source) if source else None
        if request is None:
            yield f"{_named(record)} names {place_name(source) if source else 'no source'}, where no request is"
        elif view.history.journal.get(request.key or b"") is Fate.FAILED:
            yield f"{_named(record)} answers {_named(request)}, which its producer failed to send"


@invariant("V4", "cross-talk", "an outcome has its own request's id, its echoed headers and the right answer")
def cross_talk(view: View) -> Iterator[str]:
    """Aborted ones, too: what nobody sees was made by the same code."""
    for outcome in view.history.outcomes:
        source = source_of(outcome)
        request = view.requests.get(source) if source else None
        if request is None:
            continue
        ids = ids_of(request)
        if outcome.key not in (ids if is_error(outcome) else ids[:1]):
            yield f"{_named(outcome)} is keyed {outcome.key!r}, the request is {ids[0]!r}"
        if _echoes(request) - _echoes(outcome):
            yield f"{_named(outcome)} lacks {dict(_echoes(request) - _echoes(outcome))} of {_named(request)}"
        wrong = view.history.answers(request, outcome) if view.history.answers else None
        if wrong is not None:
            yield f"{_named(outcome)} of {_named(request)}: {wrong}"


def _echoes(record: Logged) -> Counter[tuple[str, bytes | None]]:
    return Counter(pair for pair in record.headers if pair[0] in ECHOED or pair[0].startswith("ce_"))


@invariant("V5", "reorder", "where order is promised, the first outcomes leave in the order of the requests")
def reorder(view: View) -> Iterator[str]:
    """Only within one output partition does Kafka know an order."""
    if view.promise.ordering == "none" and not view.exactly_once:
        return
    by_key = view.promise.ordering == "key" and not view.exactly_once
    last: dict[tuple[object, ...], int] = {}
    seen: set[Position] = set()
    for outcome in sorted(view.visible, key=lambda outcome: outcome.position):
        source = source_of(outcome)
        request = view.requests.get(source) if source else None
        if request is None or request.position in seen:
            continue
        seen.add(request.position)
        line = (outcome.place, request.place, request.key if by_key else None)
        if request.offset < last.get(line, -1):
            yield f"{_named(request)} was answered behind offset {last[line]}, at {place_name(outcome.position)}"
        last[line] = max(request.offset, last.get(line, -1))


@invariant("V6", "commit-ahead", "no commit passes a request whose outcome was not in the log yet, and none moves back")
def commit_ahead(view: View) -> Iterator[str]:
    """At every sample. What counts as outcome is what is visible in the end, and lay below the log's end by then."""
    requests: dict[Place, list[Logged]] = defaultdict(list)
    for request in sorted(view.history.inputs, key=lambda request: request.position):
        requests[request.place].append(request)
    marks: dict[Place, int] = {}
    proven: dict[Place, int] = defaultdict(int)
    for number, sample in enumerate(view.history.samples):
        for place, mark in sample.committed.items():
            if mark < marks.get(place, 0):
                yield f"sample {number}: {place} moved back from {marks[place]} to {mark}"
            if mark > view.history.ends.get(place, mark):
                yield f"sample {number}: {place} is committed at {mark}, behind its end {view.history.ends[place]}"
            marks[place] = mark
            waiting = requests[place]
            while proven[place] < len(waiting) and waiting[proven[place]].offset < mark:
                request = waiting[proven[place]]
                proven[place] += 1
                if not _is_settled_at(view, request.position, sample.ends):
                    yield f"sample {number}: {place} is committed at {mark}, {_named(request)} was not settled"


def _is_settled_at(view: View, position: Position, ends: object) -> bool:
    """Whether an outcome, and the dead letter that belongs to it, lay below these ends."""
    reached: dict[Place, int] = dict(ends)  # type: ignore[call-overload]

    def is_there(record: Logged) -> bool:
        return record.offset < reached.get(record.place, 0)

    if view.is_repeat(view.requests[position]) and not (view.exactly_once and position in view.outcomes_of):
        return True  # at least once an expelled member may answer it, late, for want of another outcome of its id
    there = [outcome for outcome in view.outcomes_of.get(position, ()) if is_there(outcome)]
    needs_letter = bool(there) and all(map(has_letter, there))
    return bool(there) and (not needs_letter or any(map(is_there, view.letters_of.get(position, ()))))


@invariant("V7", "stuck", "at the end nothing is left: no lag, and no open transaction")
def stuck(view: View) -> Iterator[str]:
    """Only a run that was to go to its end."""
    if not view.promise.settled:
        return
    for place, end in view.history.ends.items():
        mark = view.history.committed.get(place, 0)
        if mark < end:
            yield f"{place} is committed at {mark}, its end is {end}"
    for place, (stable, end) in view.history.stable.items():
        if stable < end:
            yield f"{place} has a transaction open at {stable}, its end is {end}"


@invariant("V8", "torn", "a transaction is seen whole or not at all: outcomes, dead letters and offsets together")
def torn(view: View) -> Iterator[str]:
    """Without transactions nothing may be invisible."""
    history = view.history
    hidden = [record for record in (*history.outcomes, *history.letters) if not view.sees(record)]
    if not view.exactly_once:
        yield from (f"{_named(record)} is invisible, and there were no transactions" for record in hidden)
        return
    for record in hidden:
        source = coordinates_of(record) or source_of(record)
        is_committed = source is not None and source[2] < history.committed.get(source[:2], 0)
        if source and is_committed and source not in view.outcomes_of and not _is_spared(view, source):
            yield f"{_named(record)} was aborted, but {place_name(source)} is committed"
    for source in view.outcomes_of:
        if source[2] >= history.committed.get(source[:2], 0):
            yield f"the outcome of {place_name(source)} is visible, but its offset is not committed"
    for source, letters in view.letters_of.items():
        if source not in view.outcomes_of:
            yield f"the dead letter of {place_name(source)} is visible at {_named(letters[0])}, its error is not"


def _is_spared(view: View, source: Position) -> bool:
    """Whether a request needs no outcome: its try was aborted, and who read it again knew that its id was answered."""
    request = view.requests.get(source)
    return request is not None and view.is_repeat(request)


@invariant("V9", "dlq-corrupt", "every error has its dead letter, and a dead letter is its request, byte for byte")
def dlq_corrupt(view: View) -> Iterator[str]:
    """With where it came from and why it is there."""
    for source, outcomes in view.outcomes_of.items():
        if all(map(has_letter, outcomes)) and source not in view.letters_of:
            yield f"{place_name(source)} ended in {outcomes[0].header('error-code')!r} and has no dead letter"
    for source, letters in view.letters_of.items():
        codes = {outcome.header("error-code") for outcome in view.outcomes_of.get(source, ()) if is_error(outcome)}
        allowed = 1 if view.exactly_once else 1 + _faults_that_cover(source, view.history.faults)
        if len(letters) > allowed:
            yield f"{place_name(source)} has {len(letters)} dead letters, {allowed} may be"
        request = view.requests.get(source)
        for letter in letters:
            if source in view.outcomes_of and letter.header("forebay-error-code") not in codes:
                yield f"{_named(letter)} says {letter.header('forebay-error-code')!r}, the outcome {codes or 'ok'}"
            if request is not None and (wrong := _spoiled(request, letter)):
                yield f"{_named(letter)} of {_named(request)}: {wrong}"


def _spoiled(request: Logged, letter: Logged) -> str | None:
    """Say what a dead letter has changed of its request. A value that its topic does not take is left out, marked."""
    left_out = letter.header("forebay-value-left-out") is not None
    if letter.key != request.key:
        return f"its key is {letter.key!r}"
    if not left_out and letter.value != request.value:
        return f"its value is {letter.value!r}"
    if not left_out and letter.headers[: len(request.headers)] != request.headers:
        return "it does not begin with the request's headers"
    if not letter.header("kafka_dlt-exception-message") or not letter.header("forebay-error-code"):
        return "it does not say why it is there"
    return None


@invariant("V10", "leak", "no resource goes beyond its declared bound")
def leak(view: View) -> Iterator[str]:
    """Memory, queues, files, threads: whatever the run watched."""
    for worker in view.history.workers:
        for name, bound in worker.bounds.items():
            if worker.highest.get(name, 0) > bound:
                yield f"{worker.name}: {name} reached {worker.highest[name]:g}, the bound is {bound:g}"


@invariant("V11", "leak-secret", "no secret appears in a log, a metric, an error or a dead letter's own headers")
def leak_secret(view: View) -> Iterator[str]:
    """What a caller put into a request comes back to the caller: only what the worker wrote counts."""
    for secret in view.history.secrets:
        for worker in view.history.workers:
            for name, text in worker.texts.items():
                if secret in text:
                    yield f"{worker.name}: {name} shows a secret"
        for record in (*filter(is_error, view.history.outcomes), *view.history.letters):
            own = [value for key, value in record.headers if key not in ECHOED and not key.startswith("ce_")]
            request = view.requests.get(coordinates_of(record) or ("", 0, 0))
            own = [value for value in own if request is None or value not in dict(request.headers).values()]
            own += [record.value] if is_error(record) else []
            if any(secret.encode() in (value or b"") for value in own):
                yield f"{_named(record)} shows a secret"


@invariant("V12", "bad-exit", "every worker ends by itself, with a code that its end calls for")
def bad_exit(view: View) -> Iterator[str]:
    """A negative code is the signal that ended it, as a shell's parent sees it."""
    for worker in view.history.workers:
        if worker.code is None:
            yield f"{worker.name} did not end"
        elif worker.code not in worker.allowed_codes:
            yield f"{worker.name} ended with {worker.code}, allowed are {sorted(worker.allowed_codes)}"


@invariant("V13", "lying-metrics", "the workers' counters agree with the logs")
def lying_metrics(view: View) -> Iterator[str]:
    """Equal where every worker's counters are known; otherwise never above."""
    workers = view.history.workers
    known = [worker.counters for worker in workers if worker.counters is not None]
    if not known:
        return
    counted: Counter[str] = Counter()
    for counters in known:
        counted.update({name: int(value) for name, value in counters.items()})
    logged = Counter((outcome.header("error-code") or b"ok").decode() for outcome in view.visible)
    logged["dead_letters"] = sum(map(view.sees, view.history.letters))
    for name in sorted(counted.keys() | logged.keys()):
        if counted[name] > logged[name] or (len(known) == len(workers) and counted[name] < logged[name]):
            yield f"{name} counts {counted[name]}, the logs have {logged[name]}"


@invariant("V14", "storm", "no worker's partitions change hands more often than the faults explain")
def storm(view: View) -> Iterator[str]:
    """Only where the run said how often that may be."""
    for worker in view.history.workers:
        if worker.allowed_rebalances is not None and worker.rebalances > worker.allowed_rebalances:
            yield f"{worker.name} saw {worker.rebalances} rebalances, {worker.allowed_rebalances} may be"


@invariant("V15", "fate", "an acknowledged request is in the log once, one of unknown fate once or not at all")
def fate(view: View) -> Iterator[str]:
    """Otherwise the loss, or the duplicate, is the broker's or the producer's, and no worker could help it."""
    found = Counter(request.key or b"" for request in view.history.inputs)
    for key, told in view.history.journal.items():
        if told is Fate.ACKED and found[key] != 1:
            yield f"{key!r} was acknowledged and is there {found[key]} times"
        elif told is Fate.UNKNOWN and found[key] > 1:
            yield f"{key!r} has an unknown fate and is there {found[key]} times"


@invariant("V16", "repeated-id", "where ids are deduplicated, a window has one final outcome of an id")
def repeated_id(view: View) -> Iterator[str]:
    """An error that asks for another try is not final."""
    span = view.promise.deduplicate_ms
    for namesakes in view.namesakes.values() if span else ():
        final = [one for one in namesakes if not all(map(_asks_again, view.outcomes_of.get(one.position, ())))]
        for one, other in pairwise(final):
            apart = view.clocks[other.position] - view.clocks[one.position]
            if apart <= span and not any(map(_asks_again, view.outcomes_of[one.position])):
                yield f"{_named(one)} and {_named(other)} were both answered, {apart} ms apart"


def _asks_again(outcome: Logged) -> bool:
    return outcome.header("error-code") in RETRIABLE


def _named(record: Logged) -> str:
    return f"{place_name(record.position)} (key {_short_bytes(record.key)})"


def _short(outcome: Logged) -> str:
    return f"{place_name(outcome.position)} {_short_bytes(outcome.value)}"


def _short_bytes(value: bytes | None) -> str:
    return repr(value if value is None or len(value) <= 60 else value[:60] + b"...")
