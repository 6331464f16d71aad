"""A broker that refuses: it admits to a topic or a group that has any rule only those whom a rule names.

On its plain listener everybody is `User:ANONYMOUS`. Its second listener wants a password, and wants it again every now
and then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from forebay.broker import EmbeddedKafka
from forebay.brokers.ports import free_port
from forebay.cli.acls import Role, rights_of
from forebay.errors import ForebayError
from forebay.settings import Settings
from tests.kafka_probe import KafkaProbe

AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
PASSWORD = "open-sesame"
RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional-id": ResourceType.TRANSACTIONAL_ID,
}


class Gate:
    """A cluster whose rules a test sets."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self.probe = KafkaProbe(servers)
        self._admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})

    def add(self, resource: str, name: str, who: str, operation: str) -> None:
        """Allow one operation."""
        wanted = AclOperation[re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation).upper()]
        kind = ResourcePatternType.LITERAL
        rule = AclBinding(RESOURCES[resource], name, kind, who, "*", wanted, AclPermissionType.ALLOW)
        for future in self._admin.create_acls([rule]).values():
            future.result(30)

    def set_password(self, user: str, password: str) -> None:
        """Let a user log in with SCRAM-SHA-512 by this password, and by no other any more."""
        terms = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted = UserScramCredentialUpsertion(user, terms, password.encode())
        for future in self._admin.alter_user_scram_credentials([wanted]).values():
            future.result(30)

    def open_to_all(self) -> None:
        """Remove every rule."""
        anything = (ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY)
        for future in self._admin.delete_acls([AclBindingFilter(*anything, AclPermissionType.ANY)]).values():
            future.result(30)

    def admit(self, settings: Settings, role: Role | None) -> None:
        """Close every topic and the group to everybody, then grant the rights of a role."""
        kafka = settings.kafka
        for name in (*kafka.input_topics, kafka.output_topic, kafka.dead_letter_topic):
            self.add("topic", name, "User:somebody-else", "ALL")
        self.add("group", kafka.group_id, "User:somebody-else", "ALL")
        for right in rights_of(role, settings) if role else ():
            self.add(right.resource, right.name, "User:ANONYMOUS", right.operation)


@pytest.fixture(scope="module")
def listeners() -> Iterator[tuple[str, str]]:
    """A broker's plain address and its protected one."""
    plain, protected, controller = free_port(), free_port(), free_port()
    jaas = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_alice="{PASSWORD}";'
    addresses = f"PLAINTEXT://127.0.0.1:{plain},LOGIN://127.0.0.1:{protected}"
    properties = AUTHORIZER | {
        "listeners": f"{addresses},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": addresses,
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,LOGIN:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listener.name.login.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
        "listener.name.login.plain.sasl.jaas.config": jaas,
        "listener.name.login.scram-sha-512.sasl.jaas.config": f"{SCRAM} required;",
        "listener.name.login.connections.max.reauth.ms": "3000",
    }
    try:
        kafka = EmbeddedKafka(port=plain, properties=properties).start()
    except ForebayError as error:
        pytest.skip(f"needs the embedded Kafka: {error}")
    with kafka:
        yield f"127.0.0.1:{plain}", f"127.0.0.1:{protected}"


@pytest.fixture
def gate(listeners: tuple[str, str]) -> Iterator[Gate]:
    gate = Gate(listeners[0])
    yield gate
    gate.open_to_all()
