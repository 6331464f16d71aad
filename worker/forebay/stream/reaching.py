"""Reach a cluster for the first time: ask for its metadata in short tries, so that a refused login is not waited out.

A refused login or certificate shows up in `error_cb` alone, which runs only while someone polls; the question
itself just times out. Blocks the caller's thread within its deadline. For the client and the tools.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from forebay.errors import KafkaUnavailableError
from forebay.stream.troubles import CLOSED_AT_ONCE, unreachable

_REFUSED = (KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED)
TRY_SECONDS = 1.0


class RefusedError(KafkaUnavailableError):
    """The broker answered and refused: the login, the certificate, or the right to look."""


def metadata(client: Any, servers: str, errors: Sequence[KafkaError], deadline: float, topic: str | None = None) -> Any:
    """Return the cluster's metadata, of one topic or of all.

    `errors` is what the client's `error_cb` appends to, `deadline` a time of the monotonic clock. Raises
    RefusedError, or KafkaUnavailableError with what the client complained about last; both name `servers`.
    """
    question = {} if topic is None else {"topic": topic}
    while True:
        try:
            return client.list_topics(timeout=TRY_SECONDS, **question)
        except KafkaException as error:
            client.poll(0)
            refused = next((one for one in errors if one.code() in _REFUSED), None)
            if refused is not None:
                raise RefusedError(f"Kafka refuses at {servers}: {refused.str()}") from error
            if time.monotonic() >= deadline:
                raise KafkaUnavailableError(unreachable(servers, complaint(errors) or error.args[0].str())) from error


def complaint(errors: Sequence[KafkaError]) -> str | None:
    """Return what the client complained about last, None if it did not."""
    said = next((one.str() for one in reversed(errors) if one.code() != KafkaError._ALL_BROKERS_DOWN), None)
    if said is None and errors:  # a connection that is made and closed again is no error to the client
        return CLOSED_AT_ONCE
    return said
