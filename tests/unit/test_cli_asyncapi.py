"""`forebay asyncapi`: the document has the structure of AsyncAPI 3.0, and every reference in it leads somewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from forebay.cli.asyncapi import as_yaml, build
from forebay.settings import Delivery, Kafka, ModelSettings, Security, Settings

REF = {"type": "object", "required": ["$ref"], "properties": {"$ref": {"type": "string", "pattern": "^#/"}}}
STRUCTURE: dict[str, Any] = {
    "type": "object",
    "required": ["asyncapi", "info"],
    "additionalProperties": False,
    "properties": {
        "asyncapi": {"const": "3.0.0"},
        "defaultContentType": {"type": "string"},
        "info": {
            "type": "object",
            "required": ["title", "version"],
            "properties": {"title": {"type": "string"}, "version": {"type": "string"}},
        },
        "servers": {
            "additionalProperties": {
                "required": ["host", "protocol"],
                "additionalProperties": False,
                "properties": {
                    "host": {"type": "string", "not": {"pattern": "://"}},
                    "protocol": {"enum": ["kafka", "kafka-secure"]},
                    "security": {"type": "array", "items": REF},
                },
            }
        },
        "channels": {
            "additionalProperties": {
                "additionalProperties": False,
                "properties": {
                    "address": {"type": ["string", "null"]},
                    "description": {"type": "string"},
                    "messages": {"type": "object", "additionalProperties": REF, "minProperties": 1},
                    "bindings": {"type": "object"},
                },
            }
        },
        "operations": {
            "additionalProperties": {
                "required": ["action", "channel"],
                "additionalProperties": False,
                "properties": {
                    "action": {"enum": ["send", "receive"]},
                    "channel": REF,
                    "summary": {"type": "string"},
                    "bindings": {"type": "object"},
                    "reply": {
                        "additionalProperties": False,
                        "properties": {
                            "channel": REF,
                            "address": {
                                "required": ["location"],
                                "properties": {"location": {"pattern": r"^\$message\.(header|payload)#(/.*)?$"}},
                            },
                        },
                    },
                },
            }
        },
        "components": {
            "additionalProperties": False,
            "properties": {
                "schemas": {"type": "object"},
                "securitySchemes": {"type": "object", "additionalProperties": {"required": ["type"]}},
                "messages": {
                    "additionalProperties": {
                        "required": ["payload"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string", "pattern": "^[a-z][A-Za-z]+$"},
                            "title": {"type": "string"},
                            "summary": {"type": "string"},
                            "contentType": {"type": "string"},
                            "headers": REF,
                            "payload": REF,
                            "bindings": {"type": "object"},
                            "correlationId": {"required": ["location"]},
                        },
                    }
                },
            },
        },
    },
}
"""What the AsyncAPI 3.0.0 specification says of the objects that the document uses."""

PLAIN = Settings(model=ModelSettings(name="m", factory="a:B"))
RICH = Settings(
    kafka=Kafka(
        bootstrap_servers="a:1, b:2",
        input_topics=("in.a", "in.b"),
        reply_topics=("replies.*",),
        security=Security(protocol="sasl_ssl", mechanism="SCRAM-SHA-512", username="u", password="p"),
    ),
    delivery=Delivery(guarantee="exactly_once"),
)


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in references(value)]
    return [found for value in node for found in references(value)] if isinstance(node, list) else []


def resolve(document: dict[str, Any], reference: str) -> Any:
    node: Any = document
    for part in reference.removeprefix("#/").split("/"):
        node = node[part]
    return node


@pytest.mark.parametrize("settings", [PLAIN, RICH])
def test_the_document_has_the_structure_of_the_specification(settings: Settings) -> None:
    jsonschema.validate(build(settings, "1.2.3"), STRUCTURE)


@pytest.mark.parametrize("settings", [PLAIN, RICH])
def test_every_reference_leads_somewhere(settings: Settings) -> None:
    document = build(settings, "1")
    found = references(document)
    assert len(found) > 20
    for reference in found:
        resolve(document, reference)


def test_every_schema_is_valid() -> None:
    for schema in build(PLAIN, "1")["components"]["schemas"].values():
        jsonschema.Draft7Validator.check_schema(schema)


def test_the_worker_receives_requests_and_replies_where_it_is_asked() -> None:
    document = build(RICH, "1")
    assert [channel["address"] for channel in document["channels"].values()] == [
        "in.a",
        "in.b",
        "inference.results",
        "inference.dead-letters",
        None,
    ]
    infer = document["operations"]["infer-requests-in-a"]
    assert infer["action"] == "receive"
    assert infer["reply"]["address"]["location"] == "$message.header#/kafka_replyTopic"
    assert document["components"]["securitySchemes"] == {"login": {"type": "scramSha512"}}
    assert [server["host"] for server in document["servers"].values()] == ["a:1", "b:2"]
    assert build(PLAIN, "1")["operations"]["infer"]["reply"]["channel"] == {"$ref": "#/channels/results"}


def test_the_yaml_is_the_same_document_without_anchors_or_secrets() -> None:
    text = as_yaml(build(RICH, "1"))
    assert yaml.safe_load(text) == build(RICH, "1")
    assert "&id" not in text
    assert "password" not in text


def test_the_exported_document_is_up_to_date() -> None:
    exported = json.loads((Path(__file__).parents[2] / "schemas" / "json" / "asyncapi.json").read_text())
    assert exported == build(Settings(), "1.0.0"), "run: forebay asyncapi --json > schemas/json/asyncapi.json"
