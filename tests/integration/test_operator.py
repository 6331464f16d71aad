"""What the log of a worker tells an operator who only watches: waiting, starting, and what came of it."""

from __future__ import annotations

from tests.faults.proxy import HOST, Proxy
from tests.integration.job import Job, ask
from tests.kafka_probe import KafkaProbe, Send


def test_a_worker_waits_for_a_late_broker_tells_its_start_and_counts_in_the_end(job: Job, kafka: KafkaProbe) -> None:
    """Nothing was said from the HTTP port on until a replica was ready, and of a bounded run nothing at its end."""
    job.send([ask(1), ask(2), Send(b"no request", b"bad")])
    proxy = Proxy(int(kafka.bootstrap_servers.rpartition(":")[2]))
    worker = job.launch(["--until-end"], kafka__bootstrap_servers=f"{HOST}:{proxy.port}")
    waiting = worker.await_event("waiting_for_kafka")
    proxy.start()
    try:
        assert worker.wait(180) == 0, worker.text()
    finally:
        proxy.stop()
    assert (waiting["servers"], waiting["why"]) == (f"{HOST}:{proxy.port}", "connection refused")
    told = [event["event"] for event in worker.events() if event["event"].startswith(("starting_", "replica_", "serv"))]
    stages = ["starting_model", "replica_loading", "replica_warming_up", "replica_checking", "replica_ready", "serving"]
    assert told == stages
    [end] = worker.events("answered")
    assert (end["requests"], end["ok"], end["errors"]) == (3, 2, {"invalid_payload": 1})
