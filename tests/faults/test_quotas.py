"""Quotas of the brokers hold a worker up: it is slow and says why, and loses, repeats and reorders nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import EmbeddedKafkas
from tests.faults.dumps import Watch
from tests.faults.history import Promise
from tests.faults.quotas import set_quota
from tests.integration.job import MakeJob, ask, ask_binary
from tests.kafka_probe import KafkaProbe, eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("quota", "value", "client", "guarantee"),
    [
        ("producer_byte_rate", 30_000, "producer", "at_least_once"),
        ("producer_byte_rate", 30_000, "producer", "exactly_once"),
        ("consumer_byte_rate", 20_000, "consumer", "at_least_once"),
    ],
)
def test_a_worker_that_a_quota_holds_up_is_slow_and_says_why(
    embedded_kafka: EmbeddedKafkas, make_job: MakeJob, quota: str, value: float, client: str, guarantee: Any
) -> None:
    """With `exactly_once` it used to try one transaction again for ever: what it held took longer than its time-out."""
    kafka = embedded_kafka()
    job = make_job(KafkaProbe(kafka.bootstrap_servers))
    settings = {"delivery__guarantee": guarantee, "delivery__transaction_timeout_ms": 3_000}
    settings |= {"delivery__ordering": "partition", "batch__max_batch_size": 16}
    total = 3_000
    with Watch(job, Promise(guarantee, "partition")) as watch:
        worker = job.start(**settings)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total // 3))
        job.await_settled()
        set_quota(kafka.bootstrap_servers, quota, value)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total // 3, total))
        name = "forebay_throttled_seconds_total"
        eventually(lambda: worker.metric(name, client=client) > 0, "the metric tells the quota", 60)
        told = worker.await_event("throttled")
        assert (told["client"], told["why"]) == (client, "a quota")
        job.await_settled(400)
    history = watch.verify()
    visible = sum(outcome.position not in history.invisible for outcome in history.outcomes)
    rewound = worker.metric("forebay_rebalances_total", kind="rewound")
    print(f"{quota}, {guarantee}: held up for {worker.metric(name):.1f} s, {rewound:.0f} transactions in vain")
    assert visible == total
    assert worker.stop() == 0
