"""A new user name and password, as the settings are read again: who gets them, and when a restart is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from forebay.records import Partition
from forebay.stream.consumer import Consumer
from forebay.stream.leases import Leases
from forebay.stream.outbox import Outbox
from forebay.stream.results import Encoder
from forebay.stream.share_consumer import ShareConsumer, Sharing
from forebay.stream.transactions import TransactionalOutbox
from tests.unit.builders import signature
from tests.unit.test_reloading import Scene, events

ENCODER = Encoder([signature()], "results", "group")
LOGIN = {
    "kafka.security.protocol": "sasl_plaintext",
    "kafka.security.mechanism": "SCRAM-SHA-512",
    "kafka.security.username": "bob",
    "kafka.security.password": "old-word",
}
NEW = {"sasl.username": "eve", "sasl.password": "new-word"}


@pytest.fixture(autouse=True)
def log() -> Iterator[list[Any]]:
    """What the worker logs."""
    with capture_logs() as found:
        yield found


class Client:
    """Takes credentials, and can nothing else."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.given: list[tuple[str, str]] = []

    def set_sasl_credentials(self, username: str, password: str) -> None:
        self.given.append((username, password))

    def set_acknowledgement_commit_callback(self, _: Any) -> None: ...
    def subscribe(self, _: Any) -> None: ...


class Login:
    """Something that logs in at Kafka."""

    def __init__(self) -> None:
        self.given: list[tuple[str, str]] = []

    def take_credentials(self, username: str, password: str) -> None:
        self.given.append((username, password))


def scene_with_login(**changes: Any) -> tuple[Scene, Login]:
    scene = Scene(**{key.replace(".", "__"): value for key, value in {**LOGIN, **changes}.items()})
    scene.worker._rooms.logins.append(login := Login())
    return scene, login


def test_a_new_password_goes_to_what_runs_and_is_told_without_it(log: list[Any]) -> None:
    scene, login = scene_with_login()
    scene.reload(kafka__security__password="new-word")
    assert login.given == [("bob", "new-word")]
    [told] = events(log, "credentials_changed")
    assert told["username"] == "bob"
    assert "new-word" not in str(log)
    assert not events(log, "reload_needs_restart")
    scene.reload()
    assert login.given == [("bob", "new-word")]
    scene.reload(kafka__security__username="eve", kafka__security__password="third")
    assert login.given[1:] == [("eve", "third")]


@pytest.mark.parametrize(
    "beside",
    [
        {"kafka__security__mechanism": "SCRAM-SHA-256"},
        {"kafka__security__tls__verify": False},
        {"kafka__bootstrap_servers": "elsewhere:9092"},
    ],
)
def test_a_password_with_another_way_to_log_in_beside_it_needs_a_restart(log: list[Any], beside: Any) -> None:
    scene, login = scene_with_login()
    scene.reload(kafka__security__password="new-word", **beside)
    assert not login.given
    assert not events(log, "credentials_changed")
    [told] = events(log, "reload_needs_restart")
    assert "kafka.security.password" in told["settings"]


def test_a_password_that_the_login_does_not_use_is_no_new_one(log: list[Any]) -> None:
    scene, login = scene_with_login(**{"kafka.security.protocol": "plaintext", "kafka.security.mechanism": None})
    scene.reload(kafka__security__password="new-word")
    assert not login.given
    assert events(log, "reload_needs_restart")


def test_settings_beside_a_new_password_are_still_named(log: list[Any]) -> None:
    scene, login = scene_with_login()
    scene.reload(kafka__security__password="new-word", batch__max_batch_size=7)
    assert login.given
    assert [told["settings"] for told in events(log, "reload_needs_restart")] == [["batch.max_batch_size"]]


@pytest.mark.parametrize("make", [lambda config: Consumer(config, []), lambda config: Outbox(config, ENCODER, "dead")])
def test_the_client_and_the_one_after_it_log_in_by_the_new_ones(make: Any) -> None:
    config: dict[str, Any] = {"sasl.username": "bob", "sasl.password": "old-word"}
    owner = make(config)
    owner.take_credentials("eve", "new-word")  # no client yet
    owner._client = client = Client()
    owner.take_credentials("eve", "new-word")
    assert client.given == [("eve", "new-word")]
    assert owner._config.items() >= NEW.items()


def test_both_producers_of_exactly_once_get_them_and_those_that_take_their_place() -> None:
    config = {"transactional.id": "one", "transaction.timeout.ms": 1000, "sasl.password": "old-word"}
    outbox = TransactionalOutbox(config, ENCODER, "dead", lambda: None)
    producers = (outbox._producer, outbox._other)
    producers[0].client = client = Client()  # the other one is being made anew
    outbox.take_credentials("eve", "new-word")
    assert client.given == [("eve", "new-word")]
    assert all(producer.config.items() >= NEW.items() for producer in producers)
    assert {producer.id for producer in producers} == {"one", "one.second"}


def test_every_hand_of_a_share_group_gets_them() -> None:
    made: list[Client] = []

    def make(*_: Any, **__: Any) -> Client:
        made.append(Client())
        return made[-1]

    member = ShareConsumer({}, ["requests"], Leases(5), Sharing(30.0, 5), most=9, make_client=make)
    member.start(Listens())
    member.take_credentials("eve", "new-word")
    assert [client.given for client in made] == [[("eve", "new-word")]] * 3


class Listens:
    """A listener to whom nothing happens."""

    def assigned(self, partitions: list[Partition]) -> None: ...
    def revoked(self, partitions: list[Partition]) -> None: ...
    def lost(self, partitions: list[Partition]) -> None: ...
