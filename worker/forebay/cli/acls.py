"""`forebay acls`: the rights that a worker and its clients need, and no more, as commands or manifests.

Pure: settings in, text out. Each right was tried by removing it.
"""

from __future__ import annotations

import json as json_module
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from forebay.cli.options import AsJson, Bootstrap, ConfigFile, SetValues, read_settings
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.settings import Settings

Format = Literal["kafka-acls", "strimzi", "terraform"]
Role = Literal["worker", "client", "lag-reader", "check"]
TYPES = {"topic": "topic", "group": "group", "transactional-id": "transactionalId"}


@dataclass(frozen=True, slots=True)
class Right:
    """One operation on one resource. `prefixed` means every resource whose name starts so."""

    resource: str
    name: str
    operation: str
    why: str
    prefixed: bool = False


def rights_of(role: Role, settings: Settings, reply_topic: str | None = None) -> list[Right]:
    """Give the rights that a role needs with these settings."""
    kafka = settings.kafka
    if role == "client":
        read = reply_topic or kafka.output_topic
        written = [Right("topic", name, "Write", "send requests") for name in kafka.input_topics]
        return [*written, Right("topic", read, "Read", "receive results")]
    if role == "lag-reader":
        seen = [Right("topic", name, "Describe", "read end offsets") for name in kafka.input_topics]
        return [*seen, Right("group", kafka.group_id, "Describe", "read committed offsets")]
    rights = [Right("topic", name, "Read", "read requests") for name in kafka.input_topics]
    rights.append(Right("topic", kafka.output_topic, "Write", "write results"))
    rights.append(Right("topic", kafka.dead_letter_topic, "Write", "write dead letters"))
    rights += _replies(kafka.reply_topics)
    rights.append(Right("group", kafka.group_id, "Read", "join the group and commit"))
    if settings.delivery.share_group:
        rights.append(Right("group", kafka.group_id, "DescribeConfigs", "queue mode: read its locks and limits"))
        rights.append(Right("group", kafka.group_id, "AlterConfigs", "queue mode: set them where they do not do"))
    if settings.delivery.guarantee == "exactly_once":
        prefix = settings.delivery.transactional_id or f"{kafka.group_id}-"
        rights.append(Right("transactional-id", prefix, "Write", "exactly_once transactions", prefixed=True))
    if role == "check":
        topics = (*kafka.input_topics, kafka.output_topic, kafka.dead_letter_topic)
        rights += [Right("topic", name, "DescribeConfigs", "forebay check: size limits") for name in topics]
    return rights


def _replies(patterns: Iterable[str]) -> list[Right]:
    """Give the right for each pattern that Kafka can say: a literal name, or text before a final `.*`, as a prefix."""
    found = []
    for pattern in patterns:
        stem = pattern.removesuffix(".*").replace("\\", "")
        if any(sign in stem for sign in "*?[](){}|^$+"):
            raise UsageError(
                f"kafka.reply_topics: {pattern!r} has no ACL of its own; grant Write on those topics by hand"
            )
        found.append(Right("topic", stem, "Write", "write replies", prefixed=pattern.endswith(".*")))
    return found


def as_commands(principal: str, rights: Sequence[Right], servers: str) -> str:
    """Give kafka-acls.sh commands."""
    lines = []
    for right in rights:
        pattern = " --resource-pattern-type prefixed" if right.prefixed else ""
        lines.append(
            f"kafka-acls.sh --bootstrap-server {shlex.quote(servers)} --add "
            f"--allow-principal {shlex.quote(principal)} --operation {right.operation} "
            f"--{right.resource} {shlex.quote(right.name)}{pattern}  # {right.why}"
        )
    return "\n".join(lines)


def as_strimzi(principal: str, rights: Sequence[Right], cluster: str) -> str:
    """Give a Strimzi KafkaUser; how it logs in is for the cluster to say."""
    import yaml

    acls: list[dict[str, Any]] = []
    for right in rights:
        kind = "prefix" if right.prefixed else "literal"
        resource = {"type": TYPES[right.resource], "name": right.name, "patternType": kind}
        acls.append({"resource": resource, "operations": [right.operation], "host": "*"})
    document = {
        "apiVersion": "kafka.strimzi.io/v1beta2",
        "kind": "KafkaUser",
        "metadata": {"name": principal.removeprefix("User:"), "labels": {"strimzi.io/cluster": cluster}},
        "spec": {"authorization": {"type": "simple", "acls": acls}},
    }
    return yaml.safe_dump(document, sort_keys=False).rstrip()


def as_terraform(principal: str, rights: Sequence[Right]) -> str:
    """Give `kafka_acl` resources of the Mongey/kafka provider."""
    types = {"topic": "Topic", "group": "Group", "transactional-id": "TransactionalID"}
    blocks = []
    for number, right in enumerate(rights, start=1):
        lines = {
            "resource_name": right.name,
            "resource_type": types[right.resource],
            "resource_pattern_type_filter": "Prefixed" if right.prefixed else "Literal",
            "acl_principal": principal,
            "acl_host": "*",
            "acl_operation": right.operation,
            "acl_permission_type": "Allow",
        }
        label = f"forebay_{number}_{right.resource.replace('-', '_')}_{right.operation.lower()}"
        body = "\n".join(f"  {key:<28} = {json_module.dumps(value)}" for key, value in lines.items())
        blocks.append(f'# {right.why}\nresource "kafka_acl" "{label}" {{\n{body}\n}}')
    return "\n\n".join(blocks)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(acls)


def acls(
    principal: Annotated[str, typer.Option("--principal", help="Who gets them, as Kafka names it.")] = "User:forebay",
    role: Annotated[
        Role, typer.Option("--for", help="worker; client: sends requests; lag-reader: KEDA; check: forebay check.")
    ] = "worker",
    format: Annotated[Format, typer.Option("--format", help="What to print.")] = "kafka-acls",
    reply_topic: Annotated[
        str | None, typer.Option("--reply-topic", help="The client's own reply topic.", show_default=False)
    ] = None,
    cluster: Annotated[str, typer.Option("--cluster", help="The Strimzi cluster's name.")] = "kafka",
    json: AsJson = False,
    bootstrap: Bootstrap = None,
    config: ConfigFile = None,
    values: SetValues = None,
) -> None:
    """Print the rights that a worker or a client needs, and no more. Changes nothing."""
    import orjson

    if ":" not in principal:
        principal = f"User:{principal}"
    settings = read_settings(config, values, {"kafka.bootstrap_servers": bootstrap})
    rights = rights_of(role, settings, reply_topic)
    if json:
        told = {"principal": principal, "rights": [asdict(right) for right in rights]}
        typer.echo(orjson.dumps(told, option=orjson.OPT_INDENT_2).decode())
    elif format == "strimzi":
        typer.echo(as_strimzi(principal, rights, cluster))
    elif format == "terraform":
        typer.echo(as_terraform(principal, rights))
    else:
        typer.echo(as_commands(principal, rights, settings.kafka.bootstrap_servers))
