"""`forebay asyncapi`: an AsyncAPI 3.0 document of a worker's topics and messages, from settings and wire models.

Pure: settings in, document out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.options import AsJson, Bootstrap, ConfigFile, SetValues, read_settings

if TYPE_CHECKING:
    from forebay.settings import Kafka, Security, Settings

CORRELATION = "$message.header#/kafka_correlationId"
SCHEMAS = {
    "inference-request": "InferenceRequest",
    "inference-result": "InferenceResult",
    "error-result": "ErrorResult",
    "request-headers": "RequestHeaders",
    "result-headers": "ResultHeaders",
    "dead-letter-headers": "DeadLetterHeaders",
}
"""The exported documents by the names they get in the components."""


def build(settings: Settings, version: str) -> dict[str, Any]:
    """Give the document. Operations are the worker's: it receives requests and sends outcomes."""
    kafka = settings.kafka
    requests = {_name(topic, "requests", len(kafka.input_topics) == 1): topic for topic in kafka.input_topics}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": f"{kafka.group_id}: batched inference over Kafka",
            "version": version,
            "description": "Every request record gets one outcome, a result or an error, keyed by the request id.",
        },
        "defaultContentType": "application/json",
        "servers": _servers(kafka),
        "channels": {
            **{name: _channel(topic, ["request"]) for name, topic in requests.items()},
            "results": _channel(kafka.output_topic, ["result", "error"]),
            "deadLetters": _channel(kafka.dead_letter_topic, ["deadLetter"]),
            **({"replies": _reply_channel(kafka)} if kafka.reply_topics else {}),
        },
        "operations": _operations(kafka, list(requests)),
        "components": {
            "messages": _messages(settings),
            "schemas": _schemas(),
            **({"securitySchemes": {"login": _login(kafka.security)}} if _login(kafka.security) else {}),
        },
    }


def _name(topic: str, single: str, alone: bool) -> str:
    return single if alone else single + "-" + "".join(sign if sign.isalnum() else "-" for sign in topic)


def _servers(kafka: Kafka) -> dict[str, Any]:
    protocol = "kafka-secure" if kafka.security.protocol.endswith("ssl") else "kafka"
    servers = {}
    for number, host in enumerate(kafka.bootstrap_servers.split(","), start=1):
        server: dict[str, Any] = {"host": host.strip(), "protocol": protocol}
        if _login(kafka.security):
            server["security"] = [{"$ref": "#/components/securitySchemes/login"}]
        servers[f"kafka{number}"] = server
    return servers


def _login(security: Security) -> dict[str, Any] | None:
    types = {"PLAIN": "plain", "SCRAM-SHA-256": "scramSha256", "SCRAM-SHA-512": "scramSha512"}
    if security.mechanism in types:
        return {"type": types[security.mechanism]}
    return {"type": "X509"} if security.tls.certificate_file else None


def _channel(address: str, messages: list[str]) -> dict[str, Any]:
    return {
        "address": address,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
        "bindings": {"kafka": {"topic": address, "bindingVersion": "0.5.0"}},
    }


def _reply_channel(kafka: Kafka) -> dict[str, Any]:
    patterns = ", ".join(kafka.reply_topics)
    return {
        "address": None,
        "description": f"The topic that a request names in kafka_replyTopic; allowed are {patterns}.",
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in ("result", "error")},
    }


def _operations(kafka: Kafka, requests: list[str]) -> dict[str, Any]:
    group = {"kafka": {"groupId": {"type": "string", "enum": [kafka.group_id]}, "bindingVersion": "0.5.0"}}
    operations: dict[str, Any] = {}
    for name in requests:
        reply: dict[str, Any] = {"channel": {"$ref": "#/channels/results"}}
        if kafka.reply_topics:
            reply = {
                "channel": {"$ref": "#/channels/replies"},
                "address": {
                    "location": "$message.header#/kafka_replyTopic",
                    "description": f"Without that header: {kafka.output_topic}.",
                },
            }
        operations[f"infer-{name}" if len(requests) > 1 else "infer"] = {
            "action": "receive",
            "channel": {"$ref": f"#/channels/{name}"},
            "summary": "Run the model on a request.",
            "bindings": group,
            "reply": reply,
        }
    operations["bury"] = {
        "action": "send",
        "channel": {"$ref": "#/channels/deadLetters"},
        "summary": "Keep a request that ended in an error, for the operator.",
    }
    return operations


def _messages(settings: Settings) -> dict[str, Any]:
    key = {"kafka": {"key": {"type": "string", "description": "The request id."}, "bindingVersion": "0.5.0"}}
    models = ", ".join(f"{model.name} {model.version}" for model in settings.served) or "none configured"
    binary = (
        "JSON, or with content-type application/octet-stream that JSON followed by raw little-endian tensors; "
        "inference-header-content-length then says how long the JSON is."
    )

    def message(title: str, summary: str, payload: str, headers: str) -> dict[str, Any]:
        return {
            "name": title[0].lower() + title.title().replace(" ", "")[1:],
            "title": title,
            "summary": summary,
            "contentType": "application/json",
            "headers": {"$ref": f"#/components/schemas/{headers}"},
            "payload": {"$ref": f"#/components/schemas/{payload}"},
            "correlationId": {"location": CORRELATION},
            "bindings": key,
        }

    request = message("Inference request", f"Models: {models}. {binary}", "InferenceRequest", "RequestHeaders")
    return {
        "request": request,
        "result": message("Inference result", binary, "InferenceResult", "ResultHeaders"),
        "error": message("Error result", "Why a request has no result.", "ErrorResult", "ResultHeaders"),
        "deadLetter": message(
            "Dead letter", "The request, byte for byte, with why it failed.", "InferenceRequest", "DeadLetterHeaders"
        ),
    }


def _schemas() -> dict[str, Any]:
    """Give the wire models' schemas with their shared definitions side by side."""
    from forebay_schemas.export import documents

    found: dict[str, Any] = {}
    for name, document in documents().items():
        body = {key: value for key, value in document.items() if key not in ("$schema", "$defs")}
        for part, schema in {SCHEMAS[name]: body, **document.get("$defs", {})}.items():
            found[part] = _moved(schema)
    return found


def _moved(schema: Any) -> Any:
    """Point references from a document's own definitions to the components."""
    if isinstance(schema, dict):
        return {
            key: value.replace("#/$defs/", "#/components/schemas/") if key == "$ref" else _moved(value)
            for key, value in schema.items()
        }
    return [_moved(part) for part in schema] if isinstance(schema, list) else schema


def as_yaml(document: dict[str, Any]) -> str:
    """Give the document as YAML without anchors, which few tools for AsyncAPI read."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, _: Any) -> bool:
            return True

    return yaml.dump(document, Dumper=Plain, sort_keys=False, allow_unicode=True).rstrip()


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(asyncapi)


def asyncapi(
    title_version: Annotated[str, typer.Option("--api-version", help="The version of your interface.")] = "1.0.0",
    json: AsJson = False,
    bootstrap: Bootstrap = None,
    config: ConfigFile = None,
    values: SetValues = None,
) -> None:
    """Print an AsyncAPI 3.0 document of the topics and messages, as YAML or with --json."""
    import orjson

    document = build(read_settings(config, values, {"kafka.bootstrap_servers": bootstrap}), title_version)
    if json:
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        typer.echo(as_yaml(document))
