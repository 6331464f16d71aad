"""A password is changed while a worker works: it is told so, loses nothing, and goes on when it may log in again."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dumps import Watch
from tests.faults.history import Promise
from tests.integration.gate import PASSWORD, Gate, gate, listeners
from tests.integration.job import MakeJob, ask, ask_binary
from tests.kafka_probe import eventually

__all__ = ["gate", "listeners"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

NEW = "open-barley"
LOGIN = {"protocol": "sasl_plaintext", "mechanism": "SCRAM-SHA-512", "username": "bob", "password": PASSWORD}


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_a_worker_with_an_old_password_says_so_and_goes_on_when_it_is_let_in_again(
    gate: Gate, listeners: tuple[str, str], make_job: MakeJob, guarantee: Any
) -> None:
    """The brokers ask for the password anew every three seconds; most ask when a connection begins."""
    job = make_job(gate.probe)
    gate.set_password("bob", PASSWORD)
    settings = {"kafka__bootstrap_servers": listeners[1], "kafka__security": LOGIN}
    settings |= {"delivery__guarantee": guarantee, "delivery__drain_timeout_ms": 2_000, "batch__max_batch_size": 16}
    total = 3_000
    with Watch(job, Promise(guarantee)) as watch:
        worker = job.start(**settings)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total // 2))
        job.await_answered(200)
        gate.set_password("bob", "another-one")
        told = "start it again with the new one"
        eventually(lambda: told in worker.await_not_ready().get("kafka", ""), "the reason is the login", 60)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total // 2, total))
        gate.set_password("bob", PASSWORD)
        watch.fault("no login", since_start=True)
        job.await_settled(300)
        worker.await_ready()
    history = watch.verify(secrets=(PASSWORD,))
    visible = sum(outcome.position not in history.invisible for outcome in history.outcomes)
    print(f"{visible - total} of {total} twice")

    gate.set_password("bob", "another-one")
    worker.await_not_ready()
    assert worker.stop() == 0
    assert "Traceback" not in worker.text()


def test_a_new_password_is_taken_at_sighup_and_the_same_worker_goes_on(
    gate: Gate, listeners: tuple[str, str], make_job: MakeJob, tmp_path: Path
) -> None:
    """It took a restart. The brokers ask anew every three seconds, so every connection has to log in by the new one."""
    job = make_job(gate.probe)
    gate.set_password("bob", PASSWORD)
    config = tmp_path / "config.yaml"

    def write(password: str) -> None:
        told = json.dumps({"kafka": {"security": {**LOGIN, "password": password}}})
        config.write_text(told, encoding="utf-8")  # JSON is YAML

    write(PASSWORD)
    settings = {"kafka__bootstrap_servers": listeners[1], "delivery__guarantee": "exactly_once"}
    settings |= {"batch__max_batch_size": 16}
    total = 3_000
    with Watch(job, Promise("exactly_once")) as watch:
        worker = job.launch(["--config", str(config)], **settings).await_ready()
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total // 2))
        job.await_answered(200)
        gate.set_password("bob", NEW)
        told = "start it again with the new one"
        eventually(lambda: told in worker.await_not_ready().get("kafka", ""), "the reason is the login", 60)
        write(NEW)
        worker.signal(signal.SIGHUP)
        assert worker.await_event("credentials_changed")["username"] == "bob"
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(total // 2, total))
        watch.fault("another password", since_start=True)
        job.await_settled(300)
        worker.await_ready()
    watch.verify(secrets=(PASSWORD, NEW))
    assert not worker.events("reload_needs_restart")
    assert worker.stop() == 0
    assert "Traceback" not in worker.text()
