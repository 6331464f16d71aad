"""A broker that refuses: `forebay acls` prints what is enough and needed, a wrong login is told at once."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Literal

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from forebay.cli.acls import Role, rights_of
from forebay.cli.app import app
from forebay.cli.check_kafka import check_kafka
from forebay.cli.findings import State, exit_code
from forebay.client import Client, InferenceTimeoutError
from forebay.errors import ConfigError, ForebayError, KafkaUnavailableError
from forebay.records import Record
from forebay.settings import Delivery, Kafka, Security, Settings
from forebay.stream import share_group
from forebay.stream.client_config import client_config, consumer_config, producer_config, share_config
from forebay.stream.consumer import Consumer
from forebay.stream.leases import Leases
from forebay.stream.results import Encoder
from forebay.stream.share_consumer import ShareConsumer
from forebay.stream.transactions import TransactionalOutbox
from forebay.wire import build_request
from tests.contract.sides import Notes, receive_until
from tests.integration.gate import PASSWORD, Gate, gate, listeners
from tests.kafka_probe import Send, eventually

__all__ = ["gate", "listeners"]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def settings(gate: Gate) -> Settings:
    names = [f"{kind}-{uuid.uuid4().hex[:10]}" for kind in ("in", "out", "dead")]
    gate.probe.create_topics(dict.fromkeys(names, 1))
    section = Kafka(
        bootstrap_servers=gate.servers,
        input_topics=(names[0],),
        output_topic=names[1],
        dead_letter_topic=names[2],
        group_id=f"group-{names[0]}",
    )
    return Settings(kafka=section)


def failures(settings: Settings) -> dict[str, str]:
    return {finding.question: finding.told for finding in check_kafka(settings) if finding.state is State.FAILED}


def with_login(settings: Settings, address: str, password: str) -> Settings:
    security = Security(protocol="sasl_plaintext", mechanism="PLAIN", username="alice", password=SecretStr(password))
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": address, "security": security})
    return settings.model_copy(update={"kafka": kafka})


def test_a_right_password_lets_check_and_client_in(settings: Settings, listeners: tuple[str, str]) -> None:
    known = with_login(settings, listeners[1], PASSWORD)
    answers = next(finding for finding in check_kafka(known) if finding.question == "Kafka answers")
    assert answers.told == "1 broker, sasl_plaintext as alice"
    with Client(known.kafka) as client, pytest.raises(InferenceTimeoutError, match="acknowledged after"):
        client.infer({"x": [1]}, timeout=2)


def test_a_wrong_password_is_told_at_once_and_never_shown(settings: Settings, listeners: tuple[str, str]) -> None:
    wrong = with_login(settings, listeners[1], "guess-guess")
    findings = list(check_kafka(wrong))
    login = next(finding for finding in findings if finding.question == "Kafka login")
    assert login.state is State.FAILED
    assert "Authentication failed" in login.told
    assert exit_code(findings) == 78
    with pytest.raises(KafkaUnavailableError, match=r"Kafka refuses at .*Authentication failed") as caught:
        Client(wrong.kafka, connect_timeout=60).open()
    assert "guess-guess" not in str(findings) + str(caught.value)


def test_a_plain_client_at_a_protected_address_is_told_so(settings: Settings, listeners: tuple[str, str]) -> None:
    wrong = settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"bootstrap_servers": listeners[1]})})
    with pytest.raises(KafkaUnavailableError, match=r"does not answer at .*closed again at once.*kafka\.security"):
        Client(wrong.kafka, connect_timeout=3).open()


def test_check_names_every_right_that_is_missing(gate: Gate, settings: Settings) -> None:
    kafka = settings.kafka
    assert failures(settings) == {}
    gate.admit(settings, None)
    gate.add("topic", kafka.output_topic, "User:ANONYMOUS", "READ")
    told = failures(settings)
    assert told[f"topic {kafka.input_topics[0]}"] == "cannot be seen: TOPIC_AUTHORIZATION_FAILED"
    assert told[f"topic {kafka.output_topic}"] == "no WRITE right (held: DESCRIBE, READ)"
    assert f"topic {kafka.dead_letter_topic}" in told
    assert f"group {kafka.group_id}" in told


@pytest.mark.parametrize("role", ["worker", "check"])
def test_check_is_content_with_the_rights_of_a_worker(gate: Gate, settings: Settings, role: Role) -> None:
    gate.admit(settings, role)
    assert failures(settings) == {}
    sizes = next(finding for finding in check_kafka(settings) if finding.question == "message sizes")
    assert sizes.state is (State.OK if role == "check" else State.SKIPPED)


def test_a_client_needs_two_rights_and_no_more(gate: Gate, settings: Settings) -> None:
    gate.admit(settings, "client")
    with Client(settings.kafka) as client, pytest.raises(InferenceTimeoutError, match="acknowledged after"):
        client.infer({"x": [1]}, timeout=2)


def test_a_client_without_a_right_is_told_which_topic_it_lacks(gate: Gate, settings: Settings) -> None:
    gate.admit(settings, None)
    gate.add("topic", settings.kafka.input_topics[0], "User:ANONYMOUS", "WRITE")
    with pytest.raises(ForebayError, match=f"topic {settings.kafka.output_topic} cannot be read: .*authorization"):
        Client(settings.kafka).open()


def test_a_worker_answers_with_its_four_rights(gate: Gate, settings: Settings, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    kafka = settings.kafka
    good, bad = build_request({"pixels": [[0.0] * 64]}), build_request({"pixels": [[1.0]]})
    gate.probe.produce(kafka.input_topics[0], [Send(value, b"id", headers) for value, headers in (good, bad)])
    gate.admit(settings, "worker")
    config = tmp_path / "worker.yaml"
    section = kafka.model_dump(mode="json", exclude_defaults=True)
    model = {"name": "digits", "factory": "examples.digits.model:Digits"}
    config.write_text(json.dumps({"kafka": section, "model": model, "ops": {"port": 0}}))
    command = [sys.executable, "-m", "forebay", "run", "--until-end", "-c", str(config), "-b", gate.servers]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr.decode()
    gate.open_to_all()
    assert len(gate.probe.read_all(kafka.output_topic)) == 2
    assert len(gate.probe.read_all(kafka.dead_letter_topic)) == 1


def test_a_share_group_needs_two_rights_more_and_each_missing_one_has_its_sentence(
    gate: Gate, settings: Settings
) -> None:
    config, group = client_config(settings.kafka), settings.kafka.group_id
    gate.probe.produce(settings.kafka.input_topics[0], [b"one"])
    shared = settings.model_copy(update={"delivery": Delivery(share_group=True)})
    gate.admit(settings, "worker")
    with pytest.raises(ConfigError, match=f"group {group} may not be read .* forebay acls"):
        share_group.agree(config, shared)
    assert list(failures(shared)) == [f"share group {group}"]
    gate.add("group", group, "User:ANONYMOUS", "DescribeConfigs")
    assert failures(shared) == {}
    with pytest.raises(
        ConfigError, match=rf"may not change the group {group} .*kafka-configs.sh .*{share_group.LOCK}="
    ):
        share_group.agree(config, shared)
    gate.add("group", group, "User:ANONYMOUS", "AlterConfigs")
    terms, changes = share_group.agree(config, shared)
    assert set(changes) == {share_group.START, share_group.ISOLATION, share_group.LOCK}

    leases = Leases(3)
    config = share_config(settings.kafka, settings.batch)
    member = ShareConsumer(config, settings.kafka.input_topics, leases, terms, most=9)
    member.start(Notes())
    found: list[Record] = []
    eventually(lambda: found.extend(member.receive(9, 0.05)) or found, "the record comes", 60)
    member.close()


def test_a_start_without_the_right_to_its_transactional_id_names_the_mend(gate: Gate, settings: Settings) -> None:
    """It used to end with 70, an internal error."""
    name = f"tx-{uuid.uuid4().hex[:10]}"
    delivery = Delivery(guarantee="exactly_once", transactional_id=name)
    gate.add("transactional-id", name, "User:somebody-else", "ALL")
    config = producer_config(settings.kafka, delivery)
    outbox = TransactionalOutbox(config, Encoder([], "out", "group"), "dead", lambda: None)
    with pytest.raises(ConfigError, match=rf"'{name}' cannot start: .* grant Write .* as forebay acls says"):
        outbox.start()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_that_lost_its_right_to_the_group_is_back_when_it_has_it(
    gate: Gate, settings: Settings, protocol: Literal["classic", "consumer"]
) -> None:
    """With the consumer protocol it used to end the worker: the client's error is one for good there."""
    kafka = settings.kafka.model_copy(update={"group_protocol": protocol})
    config = consumer_config(kafka, settings.batch)
    config |= {"session.timeout.ms": 3000, "heartbeat.interval.ms": 300} if protocol == "classic" else {}
    notes = Notes()
    member = Consumer(config, kafka.input_topics)
    member.start(notes)
    found: list[Record] = []
    receive_until(member, found, lambda: any(places for _, places in notes.told))  # the first may have none
    gate.add("group", kafka.group_id, "User:somebody-else", "ALL")
    receive_until(member, found, lambda: notes.told[-1][0] == "lost")
    assert any(event.name == "GROUP_AUTHORIZATION_FAILED" for event in member.events)
    gate.open_to_all()
    gate.probe.produce(kafka.input_topics[0], [b"one"])
    receive_until(member, found, lambda: bool(found))
    assert [kind for kind, places in notes.told if places] == ["assigned", "lost", "assigned"]
    member.close()


def test_the_command_prints_the_rights_that_these_tests_grant(settings: Settings, tmp_path: Path) -> None:
    config = tmp_path / "worker.yaml"
    config.write_text(json.dumps({"kafka": settings.kafka.model_dump(mode="json", exclude_defaults=True)}))
    result = CliRunner().invoke(app, ["acls", "--json", "--principal", "ANONYMOUS", "--config", str(config)])
    told = json.loads(result.stdout)
    assert told["principal"] == "User:ANONYMOUS"
    found = {(right["resource"], right["name"], right["operation"]) for right in told["rights"]}
    assert found == {(right.resource, right.name, right.operation) for right in rights_of("worker", settings)}
