"""The supervisor of `--devices`, with small processes in place of workers: who is started again, and how all end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from forebay.cli.run import _supervise
from forebay.errors import ConfigError, DeviceLostError, KafkaUnavailableError, UsageError
from forebay.metrics import Metrics, SupervisorMetrics
from forebay.sections.inference import ModelSettings
from forebay.settings import Kafka, Settings
from forebay.supervision.combined import Combined, merge
from forebay.supervision.devices import devices_of, settings_for
from forebay.supervision.supervisor import Patience, Supervisor
from forebay.supervision.workers import DeviceWorker, without_devices
from tests.kafka_probe import eventually

WORKER = """
import json, os, pathlib, signal, sys
from forebay.supervision.tether import tether_of_this_worker
tether = tether_of_this_worker()
signal.signal(signal.SIGTERM, lambda *_: (note("term"), os._exit(0)))
def note(what):
    with open({log!r}, "a") as file:
        file.write(f"{{tether.name}} {{what}}\\n")
signal.signal(signal.SIGHUP, lambda *_: note("hup"))
note("start")
starts = pathlib.Path({log!r}).read_text().count(f"{{tether.name}} start")
tether.watch()
{body}
while True:
    signal.pause()
"""
PATIENT = Patience(restarts=2, drain=20.0, pause=0.0, longest=0.0)


class Scene:
    """Two workers that do what `body` says, and their supervisor."""

    def __init__(self, folder: Path, body: str = "", patience: Patience = PATIENT) -> None:
        self.log = folder / "log"
        self.log.touch()
        code = WORKER.format(log=str(self.log), body=body)
        names = ["fake:0", "fake:1"]
        self.workers = [DeviceWorker([sys.executable, "-c", code], name, names) for name in names]
        self.metrics = SupervisorMetrics()
        self.supervisor = Supervisor(self.workers, patience, self.metrics)

    def notes(self) -> list[str]:
        return sorted(self.log.read_text().splitlines())

    def restarts(self) -> float:
        text = Combined([], self.metrics.registry)("/metrics")[2].decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "forebay_worker_restarts_total"
        )


def test_all_workers_that_end_well_end_the_supervisor_well(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "sys.exit(0)")
    assert scene.supervisor.run() == 0
    assert scene.notes() == ["fake:0 start", "fake:1 start"]


def test_a_worker_that_loses_its_device_or_is_killed_is_started_again(tmp_path: Path) -> None:
    body = (
        "if starts == 1: sys.exit(75) if tether.name == 'fake:0' else os.kill(os.getpid(), signal.SIGKILL)\nsys.exit(0)"
    )
    scene = Scene(tmp_path, body)
    assert scene.supervisor.run() == 0
    assert scene.notes() == ["fake:0 start"] * 2 + ["fake:1 start"] * 2
    assert scene.restarts() == 2


def test_a_worker_that_dies_too_often_ends_all_with_its_code_and_reason(tmp_path: Path) -> None:
    body = "if tether.name == 'fake:1':\n    tether.tell(sentence='the device is gone')\n    sys.exit(75)"
    scene = Scene(tmp_path, body)
    with pytest.raises(DeviceLostError, match="fake:1: the device is gone"):
        scene.supervisor.run()
    assert scene.notes() == ["fake:0 start", "fake:0 term"] + ["fake:1 start"] * 3


def test_a_wrong_setting_ends_all_at_once_and_is_said_once(tmp_path: Path) -> None:
    body = "if tether.name == 'fake:0':\n    tether.tell(sentence='set model.factory')\n    sys.exit(78)"
    scene = Scene(tmp_path, body)
    with pytest.raises(ConfigError, match=r"fake:0: set model\.factory") as raised:
        scene.supervisor.run()
    assert raised.value.exit_code == 78
    assert scene.notes().count("fake:0 start") == 1
    assert not any(worker.is_running for worker in scene.workers)


def test_no_kafka_ends_all_at_the_start(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "tether.tell(sentence='no broker answers')\nsys.exit(69)")
    with pytest.raises(KafkaUnavailableError, match="no broker answers"):
        scene.supervisor.run()


@pytest.mark.parametrize("code", [69, 78])
def test_a_worker_that_had_run_tries_again_without_kafka_or_with_spoilt_settings(tmp_path: Path, code: int) -> None:
    scene = Scene(tmp_path, f"sys.exit({{1: 75}}.get(starts, {code} if starts < 6 else 0))")  # more than it may die
    assert scene.supervisor.run() == 0
    assert scene.notes() == ["fake:0 start"] * 6 + ["fake:1 start"] * 6


def _await(scene: Scene, note: str) -> None:
    """Let the supervisor look until both workers have written a note."""
    eventually(lambda: sum(line.endswith(note) for line in scene.notes()) == 2, f"both workers note {note}")


def test_signals_reach_every_worker_and_a_second_one_leaves_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: note('term')); tether.tell(url='serving')")
    steps = [(signal.SIGHUP, "start"), (signal.SIGTERM, "hup"), (signal.SIGINT, "term")]
    turn = scene.supervisor._turn

    def step(now: float) -> None:
        if steps and sum(line.endswith(steps[0][1]) for line in scene.notes()) == 2:
            scene.supervisor.on_signal(steps.pop(0)[0])
        turn(now)

    scene.supervisor._turn = step  # type: ignore[method-assign]
    assert scene.supervisor.run() == 128 + signal.SIGINT
    assert [worker.code or worker._process.poll() for worker in scene.workers if worker._process] == [-9, -9]


def test_a_drain_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: note('term'))", Patience(2, drain=0.5))
    turn = scene.supervisor._turn
    asked: list[int] = []

    def step(now: float) -> None:
        if not asked:
            _await(scene, "start")
            scene.supervisor.on_signal(signal.SIGTERM)
            asked.append(1)
        turn(now)

    scene.supervisor._turn = step  # type: ignore[method-assign]
    assert scene.supervisor.run() == 70
    assert [line for line in scene.notes() if line.endswith("term")] == ["fake:0 term", "fake:1 term"]


def test_workers_leave_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    pid = os.fork()
    if pid == 0:
        scene.supervisor.run()
        os._exit(0)
    _await(scene, "start")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _await(scene, "term")


def test_a_device_list_reads_all_numbers_and_names() -> None:
    assert devices_of("all", lambda: 2) == ["cuda:0", "cuda:1"]
    assert devices_of("0,2") == ["cuda:0", "cuda:2"]
    assert devices_of(" cuda:0, fake:1?memory=4MiB ") == ["cuda:0", "fake:1?memory=4MiB"]
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        devices_of("all", lambda: 0)
    for wrong in ("", "gpu", "0,,1", "cuda"):
        with pytest.raises(UsageError, match="--devices takes all, 0,2 or cuda:0,cuda:1"):
            devices_of(wrong)
    with pytest.raises(UsageError, match=r"cuda:0 twice.*inference\.replicas"):
        devices_of("0,cuda:0")


def test_each_worker_has_names_of_its_own_towards_kafka() -> None:
    kafka = Kafka(client={"group.instance.id": "host-a", "linger.ms": 2})
    settings = Settings(kafka=kafka, model=ModelSettings(factory="a:B"))
    first, second = (settings_for(settings, device, ["cuda:0", "cuda:3"]) for device in ("cuda:0", "cuda:3"))
    assert first.kafka.client == {"client.id": "forebay-cuda-0", "group.instance.id": "host-a-cuda-0", "linger.ms": 2}
    assert second.kafka.client["group.instance.id"] == "host-a-cuda-3"
    assert (first.inference.device, second.inference.device) == ("cuda:0", "cuda:3")
    assert first.delivery.transactional_id is None  # found on the host: see stream.identity
    named = settings.model_copy(update={"delivery": settings.delivery.model_copy(update={"transactional_id": "tx"})})
    assert settings_for(named, "fake:0?memory=4MiB", ["fake:0"]).delivery.transactional_id == "tx-fake-0"
    assert "group.instance.id" not in settings_for(Settings(), "cuda:0", ["cuda:0"]).kafka.client


def test_a_worker_gets_the_supervisors_arguments_without_the_devices() -> None:
    given = ["run", "--devices", "all", "-c", "worker.yaml", "--devices=0,1", "--until-end"]
    assert without_devices(given) == ["run", "-c", "worker.yaml", "--until-end"]


def test_metrics_of_all_workers_are_one_exposition_with_a_label_for_the_device() -> None:
    texts = {}
    for device in ("fake:0", "fake:1"):
        metrics = Metrics()
        metrics.requests.labels("m", "ok").inc(3)
        metrics.queue_duration.observe("m", [0.1])
        texts[device] = Combined([], metrics.registry)("/metrics")[2].decode()
    families = {family.name: family for family in text_string_to_metric_families(merge(texts))}
    requests = {sample.labels["device"]: sample.value for sample in families["forebay_requests"].samples
                if sample.name == "forebay_requests_total"}  # fmt: skip
    assert requests == {"fake:0": 3, "fake:1": 3}
    unlabelled = [sample.labels for sample in families["forebay_queue_bytes"].samples]
    assert unlabelled == [{"device": "fake:0"}, {"device": "fake:1"}]
    assert merge(texts).count("# TYPE forebay_requests_total counter") == 1


def test_no_metric_of_a_worker_has_a_device_label_of_its_own() -> None:
    assert [name for name, _, labels, _ in Metrics().declared() if "device" in labels] == []


def test_workers_that_start_are_live_and_not_ready() -> None:
    worker = DeviceWorker(["true"], "fake:0", ["fake:0"])
    combined = Combined([worker], CollectorRegistry())
    assert combined("/livez")[0] == 200
    assert combined("/readyz")[0] == 503
    assert b"fake:0 worker" in combined("/readyz")[2]
    assert combined("/nothing")[0] == 404
    worker.url = "http://127.0.0.1:9"  # nobody listens there
    assert combined("/livez")[0] == 503
    assert b"it does not answer" in combined("/livez")[2]


def test_a_wrong_device_list_starts_nothing() -> None:
    with pytest.raises(UsageError):
        _supervise(Settings(model=ModelSettings(factory="a:B")), "gpu")
