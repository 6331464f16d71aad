"""Settings as librdkafka properties: what a guarantee rests on cannot be changed from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest

from forebay.errors import ConfigError
from forebay.settings import Batch, Delivery, Kafka
from forebay.stream.client_config import OWNED, REFUSED, client_config, consumer_config, producer_config


def kafka(**values: Any) -> Kafka:
    return Kafka.model_validate(values)


def with_client(**properties: Any) -> Kafka:
    return kafka(client={key.replace("__", "."): value for key, value in properties.items()})


CONFIGS = [lambda k: client_config(k), lambda k: consumer_config(k, Batch()), lambda k: producer_config(k, Delivery())]


def test_offsets_are_never_committed_by_the_client_itself() -> None:
    found = consumer_config(kafka(), Batch())
    assert found["enable.auto.commit"] is False
    assert found["enable.auto.offset.store"] is False
    assert found["isolation.level"] == "read_committed"


def test_outcomes_are_acknowledged_by_all_replicas_and_sent_without_end() -> None:
    found = producer_config(kafka(), Delivery())
    assert (found["acks"], found["enable.idempotence"], found["message.timeout.ms"]) == ("all", True, 0)
    assert "transactional.id" not in found


def test_exactly_once_gives_the_producer_its_transactions() -> None:
    delivery = Delivery(guarantee="exactly_once", transactional_id="me", transaction_timeout_ms=9_000)
    found = producer_config(kafka(), delivery)
    assert found["transactional.id"] == "me"
    assert found["transaction.timeout.ms"] == 9_000
    assert found["message.timeout.ms"] <= 9_000
    assert found["enable.idempotence"] is True


def test_the_settings_of_a_group_reach_its_consumer() -> None:
    found = consumer_config(kafka(bootstrap_servers="h:1,h:2", group_id="g"), Batch())
    assert (found["bootstrap.servers"], found["group.id"]) == ("h:1,h:2", "g")
    assert found["partition.assignment.strategy"] == "cooperative-sticky"


def test_the_client_never_chooses_by_itself_where_to_start() -> None:
    for reset in ("earliest", "latest", "error"):
        assert consumer_config(kafka(auto_offset_reset=reset), Batch())["auto.offset.reset"] == "error"


def test_a_queue_of_any_size_is_taken_by_the_client() -> None:
    """A batch.max_batch_size above 625,000 was refused, with a sentence about kafka.client."""
    ck.Consumer(consumer_config(kafka(), Batch(max_batch_size=100_000_000))).close()


def test_the_new_group_protocol_has_no_properties_of_the_old_one() -> None:
    found = consumer_config(kafka(group_protocol="consumer"), Batch())
    assert found["group.protocol"] == "consumer"
    for key in ("partition.assignment.strategy", "session.timeout.ms", "heartbeat.interval.ms"):
        assert key not in found


@pytest.mark.parametrize("group_protocol", ["classic", "consumer"])
@pytest.mark.parametrize("queue_bytes", [1_024, 1 << 20, 1 << 32])
def test_librdkafka_takes_every_property(group_protocol: str, queue_bytes: int) -> None:
    settings = kafka(bootstrap_servers="127.0.0.1:1", group_protocol=group_protocol)
    ck.Consumer(consumer_config(settings, Batch(max_queue_bytes=queue_bytes)), logger=_silent()).close()
    ck.Producer(producer_config(settings, Delivery()), logger=_silent())
    delivery = Delivery(guarantee="exactly_once", transactional_id="t")
    ck.Producer(producer_config(settings, delivery), logger=_silent())


def _silent() -> Any:
    import logging

    logger = logging.getLogger("silent")
    logger.disabled = True
    return logger


@pytest.mark.parametrize("queue_bytes", [1_024, 64 << 20, 1 << 40])
def test_the_clients_own_prefetch_is_bounded(queue_bytes: int) -> None:
    found = consumer_config(kafka(), Batch(max_queue_bytes=queue_bytes))
    assert 1_024 <= found["queued.max.messages.kbytes"] <= 32_768


# ---------------------------------------------------------------------- the user's own properties


@pytest.mark.parametrize("key", sorted(OWNED))
@pytest.mark.parametrize("config", CONFIGS)
def test_a_property_that_a_setting_says_already_is_refused_with_the_setting(config: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=OWNED[key]) as raised:
        config(kafka(client={key: "x"}))
    assert key in str(raised.value)


@pytest.mark.parametrize("key", [*sorted(REFUSED), "delivery.report.only.error", "builtin.features"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_property_that_would_break_a_guarantee_is_refused(config: Any, key: str) -> None:
    with pytest.raises(ConfigError, match="may not be changed") as raised:
        config(kafka(client={key: "x"}))
    assert key in str(raised.value)


@pytest.mark.parametrize(
    "key", ["error_cb", "on_commit", "stats_cb", "oauth_cb", "logger", "on_delivery", "throttle_cb"]
)
def test_a_callback_cannot_be_a_word_in_a_file(key: str) -> None:
    """The client takes some of its properties as Python functions; text in their place was a TypeError at start."""
    for config in CONFIGS:
        with pytest.raises(ConfigError, match=key):
            config(kafka(client={key: "x"}))


def test_a_property_of_both_reaches_consumer_and_producer() -> None:
    settings = with_client(socket__keepalive__enable=True)
    assert all(config(settings)["socket.keepalive.enable"] is True for config in CONFIGS)


def test_a_property_of_one_side_reaches_that_side_only() -> None:
    settings = with_client(fetch__min__bytes=5, linger__ms=7, compression__type="lz4", session__timeout__ms=9_000)
    consumer, producer = consumer_config(settings, Batch()), producer_config(settings, Delivery())
    assert (consumer["fetch.min.bytes"], consumer["session.timeout.ms"]) == (5, 9_000)
    assert (producer["linger.ms"], producer["compression.type"]) == (7, "lz4")
    assert not {"linger.ms", "compression.type"} & set(consumer)
    assert not {"fetch.min.bytes", "session.timeout.ms"} & set(producer)
    assert not {"fetch.min.bytes", "linger.ms"} & set(client_config(settings))


def test_a_users_property_wins_over_a_default_of_ours() -> None:
    assert producer_config(with_client(linger__ms=50), Delivery())["linger.ms"] == 50
    assert client_config(with_client(client__id="mine"))["client.id"] == "mine"


# ---------------------------------------------------------------------- security


def secured(**values: Any) -> dict[str, Any]:
    return client_config(kafka(security=values))


def test_a_plain_cluster_needs_no_security_properties() -> None:
    assert not [key for key in client_config(kafka()) if key.startswith(("sasl.", "ssl.", "security."))]


def test_sasl_and_tls_become_properties(tmp_path: Path) -> None:
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / name).write_text("x")
    files = {
        "ca_file": tmp_path / "ca.pem",
        "certificate_file": tmp_path / "cert.pem",
        "key_file": tmp_path / "key.pem",
    }
    found = secured(
        protocol="sasl_ssl", mechanism="SCRAM-SHA-512", username="me", password="geheim",
        tls={**files, "key_password": "k", "verify": False},
    )  # fmt: skip
    expected = {
        "security.protocol": "sasl_ssl",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "me",
        "sasl.password": "geheim",
        "ssl.ca.location": str(tmp_path / "ca.pem"),
        "ssl.certificate.location": str(tmp_path / "cert.pem"),
        "ssl.key.location": str(tmp_path / "key.pem"),
        "ssl.key.password": "k",
        "enable.ssl.certificate.verification": False,
    }
    assert {key: found[key] for key in expected} == expected


def test_certificates_are_verified_unless_that_is_turned_off() -> None:
    assert "enable.ssl.certificate.verification" not in secured(protocol="ssl")


@pytest.mark.parametrize("name", ["ca_file", "certificate_file", "key_file"])
def test_a_tls_file_that_is_not_there_is_refused_by_its_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        secured(protocol="ssl", tls={name: tmp_path / "nowhere.pem"})


def test_a_full_prefetch_stops_the_fetcher_for_milliseconds_only() -> None:
    """The client's default of one second starved the loop: 35,000 small requests a second in place of 65,000."""
    found = consumer_config(Kafka(), Batch())
    assert found["fetch.queue.backoff.ms"] <= 10
