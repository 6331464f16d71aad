"""Apache Kafka in a container, where a Docker engine answers: the ladder's rung between our own JVM and the mock.

testcontainers' KafkaContainer is written for another image and does not start this one, so this is a plain
container with the image's own variables and a host port that is fixed before it starts: the broker has to advertise it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forebay.brokers.jars import KAFKA_VERSION, Announce
from forebay.brokers.ports import free_port
from forebay.brokers.properties import HOST, NodeAddress, server_properties
from forebay.errors import ConfigError, KafkaUnavailableError

IMAGE = f"apache/kafka:{KAFKA_VERSION}"
START_SECONDS = 90.0
_INSIDE = 9092
_INSIDE_FOR_CONTROLLERS = 9093


@contextlib.contextmanager
def container_broker(announce: Announce) -> Iterator[str]:
    """Run the image and yield the bootstrap servers; the container is removed at the end."""
    port = free_port()
    container = _describe(port, announce)
    try:
        container.start()
    except Exception as error:  # docker, requests and testcontainers each raise their own
        raise KafkaUnavailableError(f"the container {IMAGE} does not start: {_reason(error)}") from error
    try:
        _await_answer(container, f"{HOST}:{port}")
        yield f"{HOST}:{port}"
    finally:
        container.stop()


def environment(port: int) -> dict[str, str]:
    """Return the variables that make the image a single node which host programs reach at `port`."""
    node = NodeAddress(1, port, _INSIDE_FOR_CONTROLLERS)
    properties = server_properties(node, [node], Path("/tmp/kafka"), {})
    properties["listeners"] = f"PLAINTEXT://:{_INSIDE},CONTROLLER://:{_INSIDE_FOR_CONTROLLERS}"
    # Clients on the host reach the published port; nobody else talks to a single node from inside.
    return {"KAFKA_" + name.replace(".", "_").upper(): value for name, value in properties.items()}


def _describe(port: int, announce: Announce) -> Any:
    try:
        import docker  # type: ignore[import-untyped]
        from testcontainers.core.config import testcontainers_config
        from testcontainers.core.container import DockerContainer
    except ImportError as error:
        raise ConfigError("testcontainers is not installed: pip install testcontainers") from error
    logging.getLogger("testcontainers").setLevel(logging.WARNING)
    try:
        client = docker.from_env(timeout=10)
        client.ping()
    except Exception as error:
        raise KafkaUnavailableError("no Docker engine answers") from error
    if not _has_image(client, IMAGE):
        announce(f"pulling {IMAGE} once (about 400 MB)")
    # The reaper is an image of its own, which a machine without a registry cannot have; the container is removed by us.
    testcontainers_config.ryuk_disabled = not _has_image(client, testcontainers_config.ryuk_image)
    client.close()
    container = DockerContainer(IMAGE)
    published: dict[str, Any] = container.ports
    published[f"{_INSIDE}/tcp"] = (HOST, port)  # with_bind_ports would publish it to the whole network
    for name, value in environment(port).items():
        container = container.with_env(name, value)
    return container


def _has_image(client: Any, name: str) -> bool:
    import docker.errors  # type: ignore[import-untyped]

    try:
        client.images.get(name)
    except docker.errors.DockerException:
        return False
    return True


def _await_answer(container: Any, servers: str) -> None:
    from forebay.stream import admin

    try:
        admin.wait_until_ready({"bootstrap.servers": servers}, timeout_seconds=START_SECONDS)
    except KafkaUnavailableError as error:
        _, printed = container.get_logs()
        raise KafkaUnavailableError(
            f"{error}; the container printed: {printed.decode(errors='replace')[-800:]}"
        ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
