"""Fixtures that every test may use: a real broker, topics of its own, and a view of Kafka from outside."""

from __future__ import annotations

import gc
import itertools
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from forebay.broker import Broker, EmbeddedKafka, any_broker
from forebay.errors import ForebayError
from tests.kafka_probe import KafkaProbe, Read, Send, eventually
from tests.quick_java import quick_java
from tests.quick_python import plain_python as plainly
from tests.quick_python import quick_python

__all__ = ["EmbeddedKafkas", "KafkaProbe", "Read", "Send", "Topics", "eventually"]

Topics = Callable[..., list[str]]
EmbeddedKafkas = Callable[..., EmbeddedKafka]


def pytest_collection_finish() -> None:
    """Take what is there by now (torch, the tests) out of the collector's rounds.

    Whatever runs out of memory collects, and a round over a million living objects takes a third of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def quick_brokers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every Kafka that this session starts, starts quickly."""
    cache = getattr(request.config, "cache", None)
    with quick_java(None if cache is None else cache.mkdir("java")):
        yield


@pytest.fixture(scope="session")
def quick_workers() -> Iterator[None]:
    """Every worker that this session starts, starts quickly."""
    with quick_python():
        yield


@pytest.fixture
def plain_python() -> Iterator[None]:
    """Workers of this test start as their users start them."""
    with plainly():
        yield


@pytest.fixture(autouse=True)
def _as_users_start_them(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("long") is not None:
        request.getfixturevalue("plain_python")


@pytest.fixture(scope="session")
def any_kind_of_broker(quick_brokers: None) -> Iterator[Broker]:
    """The first broker of the ladder, for the whole session; it may be the mock."""
    with any_broker() as broker:
        yield broker


@pytest.fixture
def broker(any_kind_of_broker: Broker) -> Broker:
    """A real broker, shared by the session: use topics and groups of your own. Skips where there is only the mock."""
    if not any_kind_of_broker.is_real:
        pytest.skip("needs a real Kafka, and this machine has only librdkafka's mock cluster")
    return any_kind_of_broker


@pytest.fixture
def kafka(broker: Broker) -> KafkaProbe:
    """Kafka from the test's side, on the session's broker."""
    return KafkaProbe(broker.bootstrap_servers)


@pytest.fixture
def topics(kafka: KafkaProbe) -> Iterator[Topics]:
    """A factory: `topics("requests", "results", partitions=3)` makes new topics and returns their unique names.

    The names come in order. The topics are deleted after the test, so that a session's broker stays small.
    """
    made: list[str] = []

    def make(*names: str, partitions: int = 1, **topic_config: Any) -> list[str]:
        unique = [f"{name}-{uuid.uuid4().hex[:10]}" for name in names or ("topic",)]
        kafka.create_topics(dict.fromkeys(unique, partitions), **topic_config)
        made.extend(unique)
        return unique

    yield make
    kafka.delete_topics(*made)


_group_numbers = itertools.count(1)


@pytest.fixture
def group_id() -> str:
    """A consumer group that no other test uses."""
    return f"group-{os.getpid()}-{next(_group_numbers)}-{uuid.uuid4().hex[:6]}"


@pytest.fixture
def embedded_kafka(quick_brokers: None) -> Iterator[EmbeddedKafkas]:
    """A factory of brokers of the test's own, to kill and pause: `embedded_kafka(brokers=3)` returns a started cluster.

    Every one is stopped after the test, whatever became of it. Skips where the embedded Kafka cannot be had.
    """
    with ExitStack() as stack:

        def start(brokers: int = 1, **options: Any) -> EmbeddedKafka:
            try:
                return stack.enter_context(EmbeddedKafka(brokers, **options))
            except ForebayError as error:
                if "forebay[broker]" in str(error) or "cannot be fetched" in str(error):
                    pytest.skip(str(error))
                raise

        yield start
