"""The broker is upgraded while a worker works: an older Kafka stops, a newer one starts on its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.brokers.ports import free_port
from tests.conftest import EmbeddedKafkas
from tests.faults.dumps import Watch
from tests.faults.history import Promise
from tests.integration.job import MakeJob, ask, ask_binary
from tests.kafka_probe import KafkaProbe

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

OLD = "3.9.1"


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_a_worker_goes_on_with_the_newer_broker_and_loses_nothing(
    embedded_kafka: EmbeddedKafkas, make_job: MakeJob, tmp_path: Path, guarantee: Any
) -> None:
    port, data = free_port(), tmp_path / "kafka"
    old = embedded_kafka(port=port, data_dir=data, version=OLD)
    job = make_job(KafkaProbe(old.bootstrap_servers))
    total = 4_000
    with Watch(job, Promise(guarantee)) as watch:
        worker = job.start(delivery__guarantee=guarantee, batch__max_batch_size=16)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total // 2))
        job.await_answered(200)
        old.stop()
        worker.await_not_ready()
        new = embedded_kafka(port=port, data_dir=data)
        assert new.version != OLD
        watch.fault("a broker was away", since_start=True)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total // 2, total))
        job.await_settled(300)
        worker.await_ready()
    history = watch.verify()
    visible = sum(outcome.position not in history.invisible for outcome in history.outcomes)
    print(f"{guarantee}: {visible - total} of {total} twice")
    assert worker.stop() == 0
