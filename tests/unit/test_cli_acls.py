"""`forebay acls`: the rights of each role, in each form."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from forebay.cli.acls import Right, as_commands, as_strimzi, as_terraform, rights_of
from forebay.errors import UsageError
from forebay.settings import Delivery, Kafka, Settings


def settings(guarantee: str = "at_least_once", **kafka: object) -> Settings:
    topics = {"input_topics": ("in",), "output_topic": "out", "dead_letter_topic": "dead", "group_id": "g"}
    return Settings(kafka=Kafka(**(topics | kafka)), delivery=Delivery(guarantee=guarantee))


def told(rights: list[Right]) -> set[tuple[str, str, str, bool]]:
    return {(right.resource, right.name, right.operation, right.prefixed) for right in rights}


WORKER = {
    ("topic", "in", "Read", False),
    ("topic", "out", "Write", False),
    ("topic", "dead", "Write", False),
    ("group", "g", "Read", False),
}


def test_a_worker_needs_four_rights_and_a_transactional_one_more() -> None:
    assert told(rights_of("worker", settings())) == WORKER
    assert told(rights_of("worker", settings("exactly_once"))) == WORKER | {("transactional-id", "g-", "Write", True)}


def test_a_client_writes_requests_and_reads_results_or_its_reply_topic() -> None:
    assert told(rights_of("client", settings())) == {("topic", "in", "Write", False), ("topic", "out", "Read", False)}
    assert ("topic", "mine", "Read", False) in told(rights_of("client", settings(), "mine"))


def test_a_lag_reader_only_looks() -> None:
    assert {operation for _, _, operation, _ in told(rights_of("lag-reader", settings()))} == {"Describe"}


def test_reply_topics_are_granted_as_far_as_kafka_can_say_them() -> None:
    rights = told(rights_of("worker", settings(reply_topics=(r"replies\..*", "inbox"))))
    assert rights == WORKER | {("topic", "replies.", "Write", True), ("topic", "inbox", "Write", False)}
    with pytest.raises(UsageError, match=r"reply_topics: .* has no ACL"):
        rights_of("worker", settings(reply_topics=("re(a|b)",)))


def test_commands_can_be_pasted_into_a_shell() -> None:
    rights = rights_of("worker", settings("exactly_once", input_topics=("odd name",)))
    first, *_, last = as_commands("User:O'Neill", rights, "k:9092").splitlines()
    words = shlex.split(first, comments=True)
    assert words[:4] == ["kafka-acls.sh", "--bootstrap-server", "k:9092", "--add"]
    assert words[words.index("--allow-principal") + 1] == "User:O'Neill"
    assert words[words.index("--topic") + 1] == "odd name"
    assert "--resource-pattern-type prefixed" in last


def test_strimzi_gets_a_user_with_the_same_rights() -> None:
    document = yaml.safe_load(as_strimzi("User:forebay", rights_of("worker", settings("exactly_once")), "prod"))
    assert document["kind"] == "KafkaUser"
    assert document["metadata"] == {"name": "forebay", "labels": {"strimzi.io/cluster": "prod"}}
    acls = document["spec"]["authorization"]["acls"]
    assert acls[-1]["resource"] == {"type": "transactionalId", "name": "g-", "patternType": "prefix"}
    assert len(acls) == 5


def test_terraform_gets_one_resource_per_right() -> None:
    text = as_terraform("User:forebay", rights_of("worker", settings()))
    assert len(re.findall(r'^resource "kafka_acl" "\w+" \{$', text, re.MULTILINE)) == 4
    assert len(set(re.findall(r'"kafka_acl" "(\w+)"', text))) == 4
    assert 'acl_principal                = "User:forebay"' in text
