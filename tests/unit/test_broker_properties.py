"""What an embedded broker is told."""

from __future__ import annotations

from pathlib import Path

from forebay.brokers.container import environment
from forebay.brokers.properties import NodeAddress, as_text, server_properties

NODES = [NodeAddress(1, 20_001, 20_011), NodeAddress(2, 20_002, 20_012), NodeAddress(3, 20_003, 20_013)]


def test_a_single_broker_replicates_nothing() -> None:
    properties = server_properties(NODES[0], NODES[:1], Path("/data"), {})

    assert properties["offsets.topic.replication.factor"] == "1"
    assert properties["transaction.state.log.min.isr"] == "1"
    assert properties["controller.quorum.voters"] == "1@127.0.0.1:20011"


def test_three_brokers_survive_the_loss_of_one() -> None:
    properties = server_properties(NODES[1], NODES, Path("/data"), {})

    assert properties["node.id"] == "2"
    assert properties["default.replication.factor"] == "3"
    for key in ("min.insync.replicas", "transaction.state.log.min.isr", "share.coordinator.state.topic.min.isr"):
        assert properties[key] == "2"
    assert properties["controller.quorum.voters"] == "1@127.0.0.1:20011,2@127.0.0.1:20012,3@127.0.0.1:20013"


def test_two_brokers_can_lose_one_and_still_take_writes() -> None:
    assert server_properties(NODES[0], NODES[:2], Path("/data"), {})["min.insync.replicas"] == "1"


def test_a_broker_listens_on_loopback_alone() -> None:
    properties = server_properties(NODES[0], NODES, Path("/data"), {})

    assert properties["listeners"] == "PLAINTEXT://127.0.0.1:20001,CONTROLLER://127.0.0.1:20011"


def test_the_callers_properties_win() -> None:
    properties = server_properties(NODES[0], NODES[:1], Path("/data"), {"message.max.bytes": "5", "log.dirs": "/else"})

    assert properties["message.max.bytes"] == "5"
    assert "log.dirs=/else\n" in as_text(properties)


def test_a_container_advertises_the_port_that_the_host_reaches() -> None:
    variables = environment(29_999)

    assert variables["KAFKA_ADVERTISED_LISTENERS"] == "PLAINTEXT://127.0.0.1:29999"
    assert variables["KAFKA_LISTENERS"] == "PLAINTEXT://:9092,CONTROLLER://:9093"
    assert variables["KAFKA_CONTROLLER_QUORUM_VOTERS"] == "1@127.0.0.1:9093"
