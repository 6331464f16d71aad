"""The embedded Apache Kafka: it is a real one, and it can be paused, killed and brought back with what it held."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from forebay.broker import RUNGS, EmbeddedKafka, any_broker
from forebay.brokers.container import container_broker
from forebay.brokers.ports import addresses
from forebay.brokers.properties import NodeAddress
from forebay.errors import ConfigError, KafkaUnavailableError, UsageError
from forebay.stream import admin
from tests.conftest import EmbeddedKafkas, KafkaProbe, Send, Topics
from tests.kafka_probe import eventually, is_gone


def test_records_come_back_as_they_were_sent(kafka: KafkaProbe, topics: Topics, group_id: str) -> None:
    [topic] = topics("round-trip", partitions=3)
    sent = [Send(b"v%d" % n, b"k%d" % n, [("h", b"x"), ("none", None)]) for n in range(1000)]

    assert kafka.produce(topic, sent) == 1000

    found = kafka.read_all(topic)
    assert {record.value for record in found} == {record.value for record in sent}
    assert len(found) == 1000
    assert all(record.headers == [("h", b"x"), ("none", None)] for record in found)
    assert sum(kafka.end_offsets(topic).values()) == 1000
    assert kafka.committed_offsets(group_id, topic) == {}
    assert kafka.lag(group_id, topic) == 1000


def test_a_topic_that_nobody_created_does_not_appear_by_itself(kafka: KafkaProbe) -> None:
    with pytest.raises(ConfigError, match="topic never-made does not exist"):
        kafka.end_offsets("never-made")

    assert "never-made" not in admin.partition_counts(kafka.config)


def test_a_topic_that_exists_is_left_as_it_is(kafka: KafkaProbe, topics: Topics) -> None:
    [topic] = topics("mine", partitions=2, retention_ms=12_345)

    assert admin.create_topics(kafka.config, {topic: 5}) == []

    assert admin.partition_counts(kafka.config)[topic] == 2
    assert admin.topic_settings(kafka.config, topic)["retention.ms"] == "12345"


def test_two_clusters_live_side_by_side_and_leave_nothing_behind(embedded_kafka: EmbeddedKafkas) -> None:
    first, second = embedded_kafka(), embedded_kafka()
    assert first.bootstrap_servers != second.bootstrap_servers
    one, two = KafkaProbe(first.bootstrap_servers), KafkaProbe(second.bootstrap_servers)
    one.create_topics({"only-here": 1})
    assert "only-here" not in admin.partition_counts(two.config)
    jvms = [psutil.Process(pid) for cluster in (first, second) for pid in cluster.java_pids()]
    assert len(jvms) == 2
    folders = {Path(line.split("=")[1]) for jvm in jvms for line in jvm.cmdline() if "log4j2" in line}

    first.stop()
    two.create_topics({"still-works": 1})
    second.stop()

    assert all(is_gone(jvm) for jvm in jvms)
    assert len(folders) == 2
    assert not any(folder.parent.parent.exists() for folder in folders)


def test_pause_kill_and_restart_keep_what_was_acknowledged(embedded_kafka: EmbeddedKafkas) -> None:
    cluster = embedded_kafka()
    probe = KafkaProbe(cluster.bootstrap_servers)
    probe.create_topics({"kept": 2})
    probe.produce("kept", [b"%d" % n for n in range(500)])
    before = probe.read_all("kept")
    address = cluster.bootstrap_servers

    cluster.pause()
    with pytest.raises(KafkaUnavailableError):
        admin.partition_counts(probe.config, timeout_seconds=1.0)
    cluster.resume()
    assert probe.read_all("kept") == before

    cluster.pause()
    cluster.kill()  # a paused one dies as well
    assert cluster.java_pids() == []
    cluster.restart()
    assert cluster.bootstrap_servers == address
    assert probe.read_all("kept") == before


@pytest.mark.slow
def test_three_brokers_lose_one_and_go_on(embedded_kafka: EmbeddedKafkas) -> None:
    cluster = embedded_kafka(brokers=3)
    probe = KafkaProbe(cluster.bootstrap_servers)
    probe.create_topics({"replicated": 3})
    probe.produce("replicated", [b"%d" % n for n in range(100)], acks="all")

    cluster.kill(1)
    probe.produce("replicated", [b"%d" % n for n in range(100, 200)], acks="all")
    cluster.restart(1)
    assert len(cluster.java_pids()) == 3
    cluster.stop_broker(2)
    assert len(cluster.java_pids()) == 2
    probe.produce("replicated", [b"%d" % n for n in range(200, 300)], acks="all")

    assert {record.value for record in probe.read_all("replicated")} == {b"%d" % n for n in range(300)}


def test_kept_data_are_there_at_the_next_start_on_another_port(tmp_path: Path) -> None:
    with EmbeddedKafka(data_dir=tmp_path) as cluster:
        probe = KafkaProbe(cluster.bootstrap_servers)
        probe.create_topics({"kept": 1})
        probe.produce("kept", [b"a", b"b"])
        with pytest.raises(ConfigError, match="another Kafka is using"):
            EmbeddedKafka(data_dir=tmp_path).start()

    with EmbeddedKafka(data_dir=tmp_path) as cluster:
        assert [record.value for record in KafkaProbe(cluster.bootstrap_servers).read_all("kept")] == [b"a", b"b"]

    with pytest.raises(ConfigError, match="holds a cluster of 1; start it with --brokers 1"):
        EmbeddedKafka(brokers=3, data_dir=tmp_path).start()


def test_a_taken_port_is_one_sentence_and_starts_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        cluster = EmbeddedKafka(port=port)

        with pytest.raises(UsageError, match=f"^port {port} is taken; choose another with --port"):
            cluster.start()

    assert cluster.java_pids() == []


def test_a_port_that_is_taken_between_the_choice_and_the_start_is_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other program accepts connections, which once looked like a broker that is still starting."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        chosen: list[int] = []

        def choose(brokers: int, port: int) -> list[NodeAddress]:
            [address] = addresses(brokers, port)
            chosen.append(address.port if chosen else taken)
            return [dataclasses.replace(address, port=chosen[-1])]

        monkeypatch.setattr("forebay.brokers.ports.addresses", choose)

        with EmbeddedKafka() as cluster:
            assert cluster.bootstrap_servers == f"127.0.0.1:{chosen[1]}"

    assert chosen[0] == taken
    assert len(chosen) == 2


def test_a_broker_that_cannot_start_says_why_and_where_its_log_is() -> None:
    cluster = EmbeddedKafka(properties={"num.io.threads": "many"})

    with pytest.raises(KafkaUnavailableError) as failure:
        cluster.start()

    assert "Invalid value many for configuration num.io.threads" in str(failure.value)
    named = re.search(r"log (\S+):", str(failure.value))
    assert named is not None
    log = Path(named.group(1))
    assert "num.io.threads" in log.read_text()
    log.unlink()
    assert cluster.java_pids() == []


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    with pytest.raises(ConfigError, match=r"cannot be written: .*; name another --data-dir"):
        EmbeddedKafka(data_dir=tmp_path / "file").start()


def test_the_mock_cluster_is_announced_as_a_stand_in_and_carries_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREBAY_KAFKA__BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setattr("forebay.broker.RUNGS", [rung for rung in RUNGS if rung[0] == "mock"])
    lines: list[str] = []

    with any_broker(lines.append) as broker:
        probe = KafkaProbe(broker.bootstrap_servers)
        assert admin.create_topics(probe.config, {"any": 4}) == ["any"]
        probe.produce("any", [b"a", b"b", b"c"])
        assert {record.value for record in probe.read_all("any")} == {b"a", b"b", b"c"}

    assert broker.kind == "mock"
    assert len(lines) == 1
    assert "stand-in" in lines[0]


@pytest.mark.docker
def test_a_container_serves_as_broker_where_a_docker_engine_answers() -> None:
    client = docker_client()
    before = {container.id for container in client.containers.list(all=True)}

    with container_broker(lambda line: None) as servers:
        probe = KafkaProbe(servers)
        probe.create_topics({"contained": 3})
        probe.produce("contained", [b"%d" % n for n in range(100)])
        assert len(probe.read_all("contained")) == 100
        assert probe.committed_offsets("nobody", "contained") == {}
        host, port = servers.split(":")
        assert host == "127.0.0.1"
        [started] = [container for container in client.containers.list() if container.id not in before]
        published = client.api.inspect_container(started.id)["HostConfig"]["PortBindings"]["9092/tcp"]
        assert published == [{"HostIp": "127.0.0.1", "HostPort": port}]

    eventually(lambda: started.id not in {left.id for left in client.containers.list(all=True)}, "it is removed")


def docker_client() -> Any:
    """Return a client, or skip with the reason why there is none."""
    docker = pytest.importorskip("docker", reason="needs the docker package")
    from forebay.brokers.container import IMAGE

    try:
        client = docker.from_env(timeout=10)
        client.ping()
    except docker.errors.DockerException:
        pytest.skip("needs a Docker engine, and none answers")
    try:
        client.images.get(IMAGE)
    except docker.errors.ImageNotFound:
        if os.environ.get("CI") != "true":
            pytest.skip(f"needs the image {IMAGE}: docker pull {IMAGE}")
    return client
