"""What brokers have refused of transactions: it is remembered, and the outcomes are changed so that they are taken.

Bookkeeping of the transactional outbox, on the loop's thread; only `report` runs where a transaction ends.
"""

from __future__ import annotations

from typing import Any

from forebay.records import Outcome
from forebay.stream.results import Encoder
from forebay.stream.verdicts import Verdict, amend, verdict_on

Report = tuple[Outcome, Verdict, str]

_BAD_TOPIC_SECONDS = 60.0


class Refusals:
    """The refusals of one outbox. `alone` outcomes that wait are to be sent one by one."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._verdicts: dict[tuple[str, int, int], tuple[Verdict, str]] = {}
        self._bad_topics: dict[str, tuple[float, str]] = {}
        self.alone = 0

    def foresee(self, outcome: Outcome, limit: int | None, now: float) -> None:
        """Change an outcome that would be refused as it is; `limit` is its topic's largest message in bytes."""
        record = outcome.record
        known = self._verdicts.get((record.topic, record.partition, record.offset))
        bad = self._bad_topics.get(outcome.topic)
        if known is not None:
            amend(outcome, *known, self._encoder)
        elif bad is not None and now < bad[0]:
            amend(outcome, Verdict.NO_SUCH_TOPIC, bad[1], self._encoder)
        elif outcome.failure is None and limit is not None and len(outcome.value) > limit - 1024:
            amend(outcome, Verdict.TOO_LARGE, "", self._encoder)

    def report(self, reports: list[Report], outcome: Outcome, is_letter: bool, error: Any) -> None:
        """Note what a delivery report says of an outcome, or of its dead letter, in a transaction's `reports`."""
        verdict = verdict_on(error, outcome, self._encoder.output_topic, is_letter=is_letter)
        if verdict is not None:
            reports.append((outcome, verdict, error.str()))

    def heed(self, reports: list[Report], together: int, now: float) -> None:
        """Change what a transaction of `together` outcomes met so that the brokers take it."""
        large = {Verdict.TOO_LARGE, Verdict.LETTER_TOO_LARGE}
        for outcome, verdict, why in reports:
            if verdict in large and together > 1:
                self.alone = together  # a topic that takes less than a batch refuses whole batches: try them alone
                continue
            record = outcome.record
            self._verdicts[record.topic, record.partition, record.offset] = (verdict, why)
            if verdict is Verdict.NO_SUCH_TOPIC:
                self._bad_topics[outcome.topic] = (now + _BAD_TOPIC_SECONDS, why)
            amend(outcome, verdict, why, self._encoder)

    def settled(self, outcomes: list[Outcome]) -> None:
        """Take in that outcomes are committed."""
        self.alone = max(self.alone - 1, 0)
        if self._verdicts:
            for outcome in outcomes:
                record = outcome.record
                self._verdicts.pop((record.topic, record.partition, record.offset), None)

    def takes_letter(self, outcome: Outcome) -> bool:
        """Whether the dead-letter topic takes the request's value beside the headers."""
        record = outcome.record
        known = self._verdicts.get((record.topic, record.partition, record.offset))
        return known is None or known[0] is not Verdict.LETTER_TOO_LARGE
