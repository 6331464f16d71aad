"""What the brokers' refusal of one outcome means, and how the outcome is changed so that they take it."""

from __future__ import annotations

from enum import Enum
from typing import Any

import confluent_kafka as ck

from forebay.records import Outcome
from forebay.stream.results import Encoder

TOO_LARGE = {ck.KafkaError.MSG_SIZE_TOO_LARGE, ck.KafkaError.RECORD_LIST_TOO_LARGE}
NO_SUCH_TOPIC = {
    ck.KafkaError.UNKNOWN_TOPIC_OR_PART,
    ck.KafkaError._UNKNOWN_TOPIC,
    ck.KafkaError.TOPIC_EXCEPTION,
    ck.KafkaError.TOPIC_AUTHORIZATION_FAILED,
}
NO_SUCH_PARTITION = {ck.KafkaError._UNKNOWN_PARTITION, ck.KafkaError._INVALID_ARG}


class Verdict(Enum):
    """Why an outcome cannot be sent as it is."""

    TOO_LARGE = "too large"
    LETTER_TOO_LARGE = "dead letter too large"
    NO_SUCH_TOPIC = "no such reply topic"
    NO_SUCH_PARTITION = "no such reply partition"


def verdict_on(error: Any, outcome: Outcome, output_topic: str, *, is_letter: bool) -> Verdict | None:
    """Say what a refusal means; None where the outcome is not at fault and is sent again as it is."""
    code = error.code()
    if code in TOO_LARGE:
        if is_letter:
            return Verdict.LETTER_TOO_LARGE
        return Verdict.TOO_LARGE if outcome.failure is None else None
    if is_letter:
        return None
    if code in NO_SUCH_PARTITION and outcome.partition is not None:
        return Verdict.NO_SUCH_PARTITION
    if outcome.topic != output_topic and code in NO_SUCH_TOPIC | {ck.KafkaError._INVALID_ARG}:
        return Verdict.NO_SUCH_TOPIC
    return None


def amend(outcome: Outcome, verdict: Verdict, why: str, encoder: Encoder) -> None:
    """Change an outcome in place so that the brokers take it: a caller's mistake must hold up nobody else."""
    if verdict is Verdict.NO_SUCH_PARTITION:
        outcome.partition = None  # any partition of the topic is better than none
        return
    if verdict is Verdict.LETTER_TOO_LARGE:
        return
    if verdict is Verdict.NO_SUCH_TOPIC and outcome.failure is not None:
        outcome.topic, outcome.partition = encoder.output_topic, None
        return
    if verdict is Verdict.TOO_LARGE:
        size = len(outcome.value)
        error = encoder.too_large(outcome, f"the result has {size} bytes, more than {outcome.topic} takes")
    else:
        error = encoder.turned_back(outcome, why)
    outcome.value, outcome.headers, outcome.failure = error.value, error.headers, error.failure
    outcome.topic, outcome.partition = error.topic, error.partition
