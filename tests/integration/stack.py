"""The local stack as a test drives it: docker-compose for a project of its own, Kafka through the host's listener,
Prometheus through its API. Everything is told apart by the project's name, so that a stack of yours stays untouched."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from examples.digits.samples import samples

ROOT = Path(__file__).resolve().parents[2]
REQUESTS, RESULTS, DEAD_LETTERS = "inference.requests", "inference.results", "inference.dead-letters"
SERVICES = ("kafka", "topics", "worker", "prometheus")  # grafana only shows what Prometheus has
BUILD_SECONDS = 1500


def missing_engine() -> str | None:
    """Why the stack cannot run here, or None."""
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode != 0:
        return "no Docker engine answers"
    return None if _compose_command() else "neither `docker compose` nor docker-compose is installed"


def _compose_command() -> list[str]:
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


def free_port() -> int:
    """Return a loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, probe: Callable[[], Any], seconds: float = 240) -> Any:
    """Ask until the answer is truthy and return it; fail with the last answer once the time is over."""
    end = time.monotonic() + seconds
    while not (answer := probe()):
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}; the last answer was {answer!r}"
        time.sleep(0.5)
    return answer


@dataclass
class Stack:
    """One stack. `up` starts it, `down` removes it; in between it can be scaled, asked and fed."""

    project: str
    kafka_port: int = field(default_factory=free_port)
    prometheus_port: int = field(default_factory=free_port)

    @property
    def bootstrap_servers(self) -> str:
        """Where Kafka listens on this machine."""
        return f"127.0.0.1:{self.kafka_port}"

    def compose(self, *words: str, check: bool = True, seconds: float = 300) -> str:
        """Run docker-compose for this project and return what it prints; fails with its output."""
        own = {"STACK_IMAGE": "forebay:test", "STACK_PARTITIONS": "6", "STACK_MODELS": "./deploy/models"}
        ports = {"STACK_KAFKA_PORT": str(self.kafka_port), "STACK_PROMETHEUS_PORT": str(self.prometheus_port)}
        command = [*_compose_command(), "--project-name", self.project, *words]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | own | ports, capture_output=True, text=True, timeout=seconds
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def up(self) -> None:
        """Build the image (minutes where nothing is cached: it holds torch) and start everything but Grafana."""
        self.compose("build", "worker", seconds=BUILD_SECONDS)
        self.compose("up", "--detach", *SERVICES)
        wait_for("one healthy worker", lambda: len(self.healthy()) == 1)

    def down(self) -> None:
        """Remove the containers, the network and the volumes."""
        self.compose("down", "--volumes", "--remove-orphans", check=False)

    def scale(self, workers: int) -> None:
        """Set the number of workers and return at once."""
        self.compose("up", "--detach", "--no-recreate", "--scale", f"worker={workers}", *SERVICES)

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What the engine knows about each container of a service, stopped ones too."""
        ids = self.compose("ps", "--quiet", service).split()
        inspected: list[dict[str, Any]] = json.loads(docker("inspect", *ids)) if ids else []
        return inspected

    def healthy(self) -> list[str]:
        """The ids of the workers that say they are ready."""
        states = {each["Id"]: each["State"] for each in self.containers("worker")}
        exited = [state for state in states.values() if state["Status"] == "exited"]
        assert not exited, f"a worker exited: {exited}\n{self.compose('logs', '--tail=50', 'worker')}"
        return [name for name, state in states.items() if state.get("Health", {}).get("Status") == "healthy"]

    def left_over(self) -> str:
        """What the engine still holds of this project."""
        label = f"label=com.docker.compose.project={self.project}"
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return "".join(docker(*kind, "--quiet", "--filter", label) for kind in kinds)

    def shares(self) -> list[int]:
        """How many partitions each member of the group has, smallest first."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        group = admin.describe_consumer_groups(["forebay"])["forebay"].result(timeout=10)
        return sorted(len(member.assignment.topic_partitions) for member in group.members)

    def prometheus(self, path: str, **parameters: str | int | float) -> dict[str, Any]:
        """Ask Prometheus' API; an error comes back as its JSON, too."""
        url = f"http://127.0.0.1:{self.prometheus_port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                loaded: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            loaded = json.load(error)
        return loaded

    def query(self, expression: str) -> dict[str, float]:
        """The present value of an expression by instance."""
        found = self.prometheus("query", query=expression)["data"]["result"]
        return {series["metric"].get("instance", ""): float(series["value"][1]) for series in found}

    def healthy_targets(self) -> list[str]:
        """The addresses of the workers that Prometheus scrapes without an error."""
        active = self.prometheus("targets", state="active")["data"]["activeTargets"]
        workers = [target for target in active if target["labels"]["job"] == "forebay"]
        return [target["labels"]["instance"] for target in workers if target["health"] == "up"]


def docker(*words: str) -> str:
    """Run docker and return what it prints; fails with its output."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr[-2000:]}"
    return done.stdout


def digits(prefix: str, count: int) -> dict[str, tuple[bytes, int]]:
    """`count` requests as a user would publish them, by id, each with the digit that is right."""
    requests = {}
    for number, sample in enumerate(samples(count)):
        pixels = sample.inputs["pixels"].ravel().tolist()
        tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": pixels}
        requests[f"{prefix}-{number}"] = (json.dumps({"inputs": [tensor]}).encode(), int(sample.right[0]))
    return requests


def publish(stack: Stack, values: Mapping[str, bytes]) -> None:
    """Write requests from the host, keyed by their id, and wait for the broker to have them."""
    producer = Producer({"bootstrap.servers": stack.bootstrap_servers, "enable.idempotence": True})
    for name, value in values.items():
        producer.produce(REQUESTS, value, name.encode())
    assert producer.flush(60) == 0


def outcomes(stack: Stack, topic: str, wanted: Iterable[str], seconds: float = 240) -> dict[str, list[Message]]:
    """Read a topic from its start, on the host, until every wanted key is there and two quiet seconds have passed.

    The records of each key in the order of arrival: more than one is a duplicate.
    """
    missing = set(wanted)
    found: dict[str, list[Message]] = {name: [] for name in missing}
    reader = Consumer({"bootstrap.servers": stack.bootstrap_servers, "group.id": "unused", "enable.auto.commit": False})
    partitions = reader.list_topics(topic, timeout=10).topics[topic].partitions
    reader.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
    end, quiet_since = time.monotonic() + seconds, time.monotonic()
    try:
        while missing or time.monotonic() - quiet_since < 2:
            assert time.monotonic() < end, f"{len(missing)} of {len(found)} missing in {topic}: {sorted(missing)[:5]}"
            message = reader.poll(0.2)
            if message is None or message.error():
                continue
            name, quiet_since = (message.key() or b"").decode(), time.monotonic()
            if name in found:
                found[name].append(message)
                missing.discard(name)
    finally:
        reader.close()
    return found


def headers(message: Message) -> dict[str, str]:
    """A record's headers as text."""
    pairs: list[tuple[str, bytes]] = list(message.headers() or ())  # type: ignore[arg-type]
    return {name: bytes(value).decode() for name, value in pairs}


def unfinished(stack: Stack) -> int:
    """Requests at or above the committed offsets, over all partitions of the input topic."""
    reader = Consumer(
        {"bootstrap.servers": stack.bootstrap_servers, "group.id": "forebay", "enable.auto.commit": False}
    )
    try:
        numbers = reader.list_topics(REQUESTS, timeout=10).topics[REQUESTS].partitions
        committed = reader.committed([TopicPartition(REQUESTS, number) for number in numbers], timeout=10)
        ends = {each.partition: reader.get_watermark_offsets(each, timeout=10)[1] for each in committed}
    finally:
        reader.close()
    return sum(ends[each.partition] - max(each.offset, 0) for each in committed)
