"""Reach a cluster for the first time: ask for its metadata in short tries, so that what is certain is not waited out.

Certain is a refused login or certificate, which shows up in `error_cb` alone, and that only while someone polls; and
that nothing listens at any address, which the client takes for a reason to go on trying. Blocks the caller's thread
within its deadline. For the client and the tools.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from forebay.errors import KafkaUnavailableError
from forebay.stream.addresses import Address, connect_to
from forebay.stream.troubles import CLOSED_AT_ONCE, is_about_tls, unreachable

_REFUSED = (KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED)
_CERTAIN = ("connection refused", "the name does not resolve", "network is unreachable", "no route to host")
FIRST_TRY_SECONDS = 0.4
TRY_SECONDS = 1.0
PROBE_SECONDS = 1.0

OnWait = Callable[[str | None], None]
"""Told once, with the cause as far as it is known, when the first try has failed and others follow."""


class RefusedError(KafkaUnavailableError):
    """The broker answered and refused: the login, the certificate, or the right to look."""


def metadata(
    client: Any,
    servers: str,
    errors: Sequence[KafkaError],
    deadline: float,
    topic: str | None = None,
    on_wait: OnWait | None = None,
) -> Any:
    """Return the cluster's metadata, of one topic or of all.

    `errors` is what the client's `error_cb` appends to, `deadline` a time of the monotonic clock. With `on_wait` a
    broker that comes up before the deadline is waited for; without, addresses where nothing listens end it at once.
    Raises RefusedError, or KafkaUnavailableError with what the client complained about last; both name `servers`.
    """
    question = {} if topic is None else {"topic": topic}
    limit, is_first = FIRST_TRY_SECONDS, True
    while True:
        try:
            return client.list_topics(timeout=max(0.1, min(limit, deadline - time.monotonic())), **question)
        except KafkaException as error:
            _hear(client)
            refused = next((one for one in errors if one.code() in _REFUSED or is_about_tls(one.str())), None)
            if refused is not None:
                raise RefusedError(f"Kafka refuses at {servers}: {refused.str()}") from error
            why = nobody_listens(servers) if is_first else None
            if time.monotonic() >= deadline or (why is not None and on_wait is None):
                told = why or complaint(errors) or error.args[0].str()
                raise KafkaUnavailableError(unreachable(servers, told)) from error
            if is_first and on_wait is not None:
                on_wait(why or complaint(errors))
            limit, is_first = TRY_SECONDS, False


def nobody_listens(servers: str, within: float = PROBE_SECONDS) -> str | None:
    """Return why nothing can answer at any of these addresses; None where something may, or it is not certain."""
    found: list[Address] = []
    # In a thread, because a name server that is silent holds its caller up for as long as it likes.
    asking = threading.Thread(target=lambda: found.extend(connect_to(servers, within)), daemon=True)
    asking.start()
    asking.join(within)
    causes = [address.error for address in list(found)]
    if not causes or not all(cause in _CERTAIN for cause in causes):
        return None
    return causes[0] if len(set(causes)) == 1 else ", ".join(f"{address}: {address.error}" for address in found)


def complaint(errors: Sequence[KafkaError]) -> str | None:
    """Return what the client complained about last, None if it did not."""
    said = next((one.str() for one in reversed(errors) if one.code() != KafkaError._ALL_BROKERS_DOWN), None)
    if said is None and errors:  # a connection that is made and closed again is no error to the client
        return CLOSED_AT_ONCE
    return said


def _hear(client: Any) -> None:
    """Let `error_cb` run. A consumer that reads already is left alone: the poll would take one of its records."""
    if not getattr(client, "assignment", list)():
        client.poll(0)
