"""The worker on other versions of Apache Kafka: the oldest that the contract names, the last 3, the first 4.

Long: each fetches its jars once (47 MB).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.broker import EmbeddedKafka
from forebay.cli.app import app
from tests.faults.dumps import Watch
from tests.faults.history import Promise
from tests.integration.job import MakeJob, ask, ask_binary, magic
from tests.kafka_probe import KafkaProbe

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

MODES: dict[str, dict[str, Any]] = {
    "at least once": {"delivery__guarantee": "at_least_once"},
    "exactly once": {"delivery__guarantee": "exactly_once", "delivery__transaction_timeout_ms": 6000},
    "in order": {"delivery__guarantee": "at_least_once", "delivery__ordering": "partition"},
}


@pytest.fixture(scope="module", params=["3.7.0", "3.9.1", "4.0.0"])
def old(request: pytest.FixtureRequest) -> Iterator[KafkaProbe]:
    with EmbeddedKafka(version=request.param) as kafka:
        yield KafkaProbe(kafka.bootstrap_servers)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_a_killed_and_a_stopped_worker_keep_every_promise(
    old: KafkaProbe, make_job: MakeJob, mode: dict[str, Any]
) -> None:
    job = make_job(old, 3)
    total = 3_000
    job.send(magic(f"p{n}", -1) if n % 100 == 0 else (ask(n) if n % 2 else ask_binary(n)) for n in range(total))
    settings = {**mode, "model__options": {"seconds": 0.004}}
    promise = Promise(mode["delivery__guarantee"], mode.get("delivery__ordering", "none"))
    with Watch(job, promise) as watch:
        worker = job.start(**settings)
        job.await_answered(500)
        worker.kill()
        watch.fault("killed")
        worker = job.start(**settings)
        job.await_answered(1_500)
        assert worker.stop() == 0, worker.text()
        job.run_to_end(**settings)
    watch.verify()


def test_check_finds_nothing_wrong(old: KafkaProbe, make_job: MakeJob) -> None:
    job = make_job(old, 1)
    job.send(map(ask, range(10)))
    settings = [f"kafka.bootstrap_servers={old.config['bootstrap.servers']}", f"kafka.input_topics={job.requests}"]
    settings += [f"kafka.output_topic={job.results}", f"kafka.dead_letter_topic={job.dead}", "ops.port=0"]
    settings += ["model.factory=tests.models:Double"]
    found = CliRunner().invoke(app, ["check", *(part for one in settings for part in ("--set", one))])
    assert found.exit_code == 0, found.output
