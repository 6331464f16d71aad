"""How a question to a cluster is asked again while things settle, and what is said when no answer comes.

Blocks the caller's thread within its time limits. The loop never calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from forebay.errors import KafkaUnavailableError
from forebay.stream.addresses import connect_to
from forebay.stream.troubles import SILENT, unreachable

Config = Mapping[str, Any]
T = TypeVar("T")
_PASSING = {
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError._TRANSPORT,
}
"""What a request meets while a new topic or a coordinator settles on its broker; the client does not retry these."""


_SILENT = (KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE)
"""What the client says when nothing came."""


def retrying(ask: Callable[[float], T], timeout_seconds: float) -> T:
    """Ask until there is an answer; `ask` gets the seconds that are left."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return ask(max(0.1, deadline - time.monotonic()))
        except KafkaException as error:
            if error.args[0].code() not in _PASSING or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def unavailable(config: Config, error: KafkaException) -> KafkaUnavailableError:
    """Say what is wrong; where the client only knows that nothing came, ask the addresses themselves."""
    servers, failure = str(config.get("bootstrap.servers")), error.args[0]
    if failure.code() not in _SILENT:
        return KafkaUnavailableError(f"Kafka at {servers} refused: {failure.str()}")
    causes = [address.error for address in connect_to(servers)]
    return KafkaUnavailableError(unreachable(servers, causes[0] if causes and all(causes) else SILENT))
