"""Replay dead letters: publish the requests in them again, with a limit to how often one goes round."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import typer

from forebay.cli.letters import Letter
from forebay.cli.progress import counting
from forebay.settings import Kafka
from forebay.stream.publish import DeliveryError, Publication, Publisher, Receipt


@dataclass(slots=True)
class Replayed:
    """What a replay did. `cut_short` says that others were written in the millisecond of the newest one."""

    replayed: int = 0
    exhausted: int = 0
    homeless: int = 0
    failed: int = 0
    newest_ms: int | None = None
    cut_short: bool = False
    topics: Counter[str] = field(default_factory=Counter)


def replay_letters(
    kafka: Kafka, letters: Iterator[Letter], limit: int | None, max_replays: int, rate: float | None
) -> Replayed:
    """Publish the request of each letter to the topic it came from, at most `rate` a second."""
    done = Replayed()

    def note(receipt: Receipt) -> None:
        if receipt.error is None:
            done.replayed += 1
        else:
            done.failed += 1
            typer.secho(f"forebay: not replayed to {receipt.topic}: {receipt.error}", err=True, fg="red")

    publisher = Publisher(kafka, linger_ms=5)
    publisher.open()
    start, sent = time.monotonic(), 0
    try:
        with counting("replayed") as advance:
            for letter, topic in eligible(letters, limit, max_replays, done):
                while rate and (left := start + sent / rate - time.monotonic()) > 0:
                    publisher.poll(min(left, 0.1))
                record = letter.record
                try:
                    publisher.publish(Publication(topic, record.value, record.key, letter.request_headers()), note)
                except DeliveryError as error:  # this letter cannot be sent; the next ones may
                    note(Receipt(topic, -1, -1, str(error)))
                publisher.poll()
                sent += 1
                advance(sent)
    finally:
        publisher.flush(60)
        publisher.close()
    return done


def eligible(
    letters: Iterator[Letter], limit: int | None, max_replays: int, done: Replayed
) -> Iterator[tuple[Letter, str]]:
    """Give the letters that may be replayed, each with its topic; count the others. With a limit, the oldest ones.

    Not the first that are read: those are of one partition, and a later `--since` would pass over older ones of others.
    """
    found: Iterable[tuple[Letter, str]] = _may_go_again(letters, max_replays, done)
    if limit is not None:
        first = heapq.nsmallest(limit + 1, found, key=lambda pair: pair[0].age)
        done.cut_short = len(first) > limit and first[limit - 1][0].age[0] == first[limit][0].age[0]
        found = first[:limit]
    for letter, topic in found:
        done.topics[topic] += 1
        done.newest_ms = max(done.newest_ms or 0, letter.record.timestamp_ms)
        yield letter, topic


def _may_go_again(letters: Iterator[Letter], max_replays: int, done: Replayed) -> Iterator[tuple[Letter, str]]:
    for letter in letters:
        if letter.replays >= max_replays:
            done.exhausted += 1
        elif letter.topic is None:
            done.homeless += 1
        else:
            yield letter, letter.topic
