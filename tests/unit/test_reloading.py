"""A worker that reloads its model on an in-memory broker: what is replaced, what each result says, what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from forebay.errors import ConfigError
from forebay.inference.messages import Failed, Mistake, Ready, Spec, Start
from forebay.inference.pool import Limits, Pool
from forebay.inference.preparers import Preparers
from forebay.inference.replicas import Replica
from forebay.inference.staging import Staging
from forebay.records import Partition
from forebay.settings import ModelSettings, Settings
from forebay.testing import ManualClock, MemoryBroker, make_worker, memory_settings
from tests.unit.builders import vector_request
from tests.unit.fakes import SIZE, FakeReplica

ROOT = Path(__file__).parents[2]
VECTOR = Spec("x", "FP32", [-1, 4])
PREPARED = Spec("ids", "FP32", [-1, 4])
BASE = {"model.factory": "tests.inference.models:Sums", "model.name": "model"}
P0 = Partition("requests", 0)


@pytest.fixture(autouse=True)
def log() -> Iterator[list[Any]]:
    """What the worker logs."""
    with capture_logs() as found:
        yield found


class Scene:
    """A worker whose replicas, preparers and settings are the test's, turn by turn."""

    def __init__(self, *, prepares: bool = False, **values: Any) -> None:
        self.prepares = prepares
        self.broker = MemoryBroker({"requests": 1, "results": 1, "dead": 1})
        self.clock = ManualClock(step=0.001)
        self.values = {**BASE, **{key.replace("__", "."): value for key, value in values.items()}}
        self.settings = memory_settings(self.values)
        self.worker, self.consumer, _ = make_worker(self.broker, self.settings, ROOT, self.clock)
        self.worker._pool.stop()
        self.replicas: list[FakeReplica] = []
        self.preparers: list[FakeReplica] = []
        replicas, preparers = self.make(self.settings.served[0], 0)
        limits = Limits(30.0, 60.0, 3, 5)
        rooms, observer = self.worker._rooms, self.worker._observer
        self.pool = self.worker._pool = rooms.pool = observer._pool = Pool(replicas, limits)
        if prepares:
            made = Preparers(Pool(preparers, limits, kind="preparer"), 1.0)
            self.worker._preparers = rooms.preparers = observer._preparers = made
        rooms.make_successors = self.make
        self.worker.reloading.read = self.read
        self.join()

    def make(self, model: ModelSettings, generation: int) -> tuple[list[Replica], list[Replica]]:
        start = Start(
            model.name, model.version, "f", None, None, {}, "cpu", "fp32", None, 8, SIZE.total, SIZE.inputs, 2, []
        )
        self.replicas.append(FakeReplica())
        replicas = [Replica("model-0", start, self.replicas[-1], Staging(SIZE, 2))]
        if not self.prepares:
            return replicas, []
        self.preparers.append(FakeReplica())
        return replicas, [Replica("model-0", start, self.preparers[-1], Staging(SIZE, 2))]

    def read(self) -> Settings:
        return memory_settings(self.values)

    def join(self) -> None:
        self.worker._rooms.launch(self.clock())
        self.get_ready()
        self.worker._rooms.collect(self.clock(), 0.0)
        self.worker._join()
        self.turn()

    def get_ready(self, **changes: Any) -> None:
        """Let the newest replica, and preparer, be ready."""
        told = {"inputs": [VECTOR], "outputs": [Spec("y", "FP32", [-1])], **changes}
        prepared = [PREPARED] if self.prepares else []
        rest: Any = (self.prepares, "cpu", 0.1, 0.1, [], [], prepared)
        self.replicas[-1].say(Ready(told["inputs"], told["outputs"], *rest))
        if self.prepares:
            self.preparers[-1].say(Ready([VECTOR], [PREPARED], True, "cpu", 0.1, 0.1, [], []))

    def turn(self, times: int = 1, seconds: float = 0.02) -> None:
        for _ in range(times):
            self.clock.advance(seconds)
            self.worker._turn()

    def publish(self, *names: str, version: str | None = None) -> None:
        for name in names:
            value, headers = vector_request(0.0)
            more = [("model-version", version.encode())] if version else []
            self.broker.append("requests", value, name.encode(), [*headers, *more], 0)

    def reload(self, **changes: Any) -> None:
        """Change the settings and ask for a reload."""
        self.values |= {key.replace("__", "."): value for key, value in changes.items()}
        self.worker.reloading.ask()
        self.turn(3)

    @property
    def versions(self) -> dict[str, str]:
        """The version that each outcome names, by id; an id that came out twice is an error."""
        found = [((one.key or b"").decode(), dict(one.headers)) for one in self.broker.records("results")]
        assert len({name for name, _ in found}) == len(found), "a request has two outcomes"
        return {name: (headers.get("model-version") or b"").decode() for name, headers in found}

    @property
    def codes(self) -> dict[str, str]:
        return {
            (one.key or b"").decode(): (dict(one.headers).get("error-code") or b"ok").decode()
            for one in self.broker.records("results")
        }

    def reloads(self, outcome: str) -> float:
        return self.worker._observer._metrics.reloads.labels("model", outcome)._value.get()


def events(log: list[Any], name: str) -> list[Any]:
    return [one for one in log if one["event"] == name]


# ---------------------------------------------------------------------- the plain way


def test_a_changed_version_takes_over_between_two_batches_and_each_outcome_names_who_made_it(log: list[Any]) -> None:
    scene = Scene(batch__max_batch_size=1)
    [old] = scene.replicas
    scene.publish("a", "b", "c")
    scene.turn(2)
    assert len(old.jobs) == 2
    scene.reload(model__version="2")
    [_, new] = scene.replicas
    scene.publish("d")
    scene.turn(2)
    assert (len(old.jobs), len(new.jobs)) == (2, 0)
    scene.get_ready()
    scene.turn(3)
    assert len(new.jobs) == 2
    for fake in (new, old, old, new, new):
        if fake.jobs:
            fake.finish()
        scene.turn(2)
    assert scene.versions == {"a": "1", "b": "1", "c": "2", "d": "2"}
    assert old.stopped
    assert scene.broker.committed == {P0: 4}
    assert scene.reloads("reloaded") == 1
    [told] = events(log, "model_reloaded")
    assert (told["model"], told["before"], told["version"]) == ("model", "1", "2")
    names = {
        sample.labels["version"] for sample in next(iter(scene.worker._observer._metrics.version.collect())).samples
    }
    assert names == {"2"}


def test_nothing_is_loaded_where_nothing_changed(log: list[Any]) -> None:
    scene = Scene()
    scene.reload()
    assert len(scene.replicas) == 1
    assert events(log, "reload")[0]["unchanged"] == ["model"]
    assert not events(log, "reload_needs_restart")


def test_a_file_that_changed_on_disk_is_loaded_and_one_that_did_not_is_not(tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"one")
    scene = Scene(model__weights=str(weights))
    scene.reload()
    assert len(scene.replicas) == 1
    weights.write_bytes(b"another")
    scene.reload()
    assert len(scene.replicas) == 2
    scene.get_ready()
    scene.turn(2)
    assert scene.reloads("reloaded") == 1
    scene.reload()
    assert len(scene.replicas) == 2


def test_what_only_a_restart_changes_is_named(log: list[Any]) -> None:
    scene = Scene()
    scene.reload(batch__max_batch_size=7, inference__replicas=2, kafka__client={"linger.ms": 9})
    [told] = events(log, "reload_needs_restart")
    assert sorted(told["settings"]) == ["batch.max_batch_size", "inference.replicas", "kafka.client"]
    assert len(scene.replicas) == 1
    scene.reload(model__name="other")
    assert "models (served: model; in the settings: other)" in events(log, "reload_needs_restart")[-1]["settings"]


def test_a_second_signal_while_a_model_loads_is_heeded_when_it_has_loaded() -> None:
    scene = Scene()
    scene.reload(model__version="2")
    scene.reload(model__version="3")
    assert len(scene.replicas) == 2
    scene.get_ready()
    scene.turn(4)
    assert scene.pool.signatures["model"].version == "2"
    assert len(scene.replicas) == 3
    scene.get_ready()
    scene.turn(4)
    assert scene.pool.signatures["model"].version == "3"


def test_a_share_changes_at_once_and_loads_nothing(log: list[Any]) -> None:
    scene = Scene(model__share=2.0)
    assert len(scene.replicas) == 1
    scene.reload(model__share=5.0)
    assert scene.pool.shares == {"model": 5.0}
    assert len(scene.replicas) == 1
    assert not events(log, "reload_needs_restart")


# ---------------------------------------------------------------------- what goes wrong


def test_settings_that_cannot_be_read_change_nothing(log: list[Any]) -> None:
    scene = Scene()

    def refuse() -> Settings:
        raise ConfigError("worker.yaml:3:1 is not valid YAML")

    scene.worker.reloading.read = refuse
    scene.reload()
    scene.publish("a")
    scene.turn(2)
    scene.replicas[0].finish()
    scene.turn(2)
    assert scene.versions == {"a": "1"}
    assert scene.reloads("invalid_settings") == 1
    assert "worker.yaml:3:1" in events(log, "reload_failed")[0]["why"]


def test_a_model_that_cannot_start_leaves_the_old_one_where_it_is_and_may_be_tried_again(log: list[Any]) -> None:
    scene = Scene()
    scene.publish("a")
    scene.reload(model__version="2")
    [old, bad] = scene.replicas
    bad.say(Failed("its rows influence each other"))
    scene.turn(3)
    assert bad.stopped
    assert scene.reloads("failed") == 1
    [told] = events(log, "reload_failed")
    assert (told["why"], told["version"], told["goes_on"]) == ("its rows influence each other", "2", "version 1")
    old.finish()
    scene.publish("b")
    scene.turn(3)
    old.finish()
    scene.turn(3)
    assert scene.versions == {"a": "1", "b": "1"}
    scene.reload()
    scene.get_ready()
    scene.turn(3)
    assert (scene.reloads("reloaded"), scene.pool.restarts) == (1, 0)


def test_a_model_with_other_tensors_is_refused_and_says_restart(log: list[Any]) -> None:
    scene = Scene()
    scene.reload(model__version="2")
    scene.get_ready(inputs=[Spec("x", "FP32", [-1, 8])])
    scene.turn(3)
    assert scene.replicas[1].stopped
    assert scene.reloads("refused") == 1
    [told] = events(log, "reload_refused")
    assert "restart the worker" in told["why"]
    assert "x FP32 [-1, 8]" in told["why"]
    assert scene.pool.signatures["model"].version == "1"


def test_a_worker_that_stops_ends_what_is_loading_at_once(log: list[Any]) -> None:
    scene = Scene()
    scene.publish("a")
    scene.turn(2)
    scene.reload(model__version="2")
    scene.worker.stop()
    scene.worker._dispatch(scene.clock())
    assert scene.replicas[1].stopped
    assert events(log, "reload_abandoned")
    scene.replicas[0].finish()
    scene.worker._drain()
    assert scene.versions == {"a": "1"}


def test_partitions_that_go_while_old_and_new_run_are_finished_by_both() -> None:
    scene = Scene(batch__max_batch_size=1)
    [old] = scene.replicas
    scene.publish("a", "b")
    scene.turn(2)
    scene.reload(model__version="2")
    scene.get_ready()
    scene.turn(2)
    scene.publish("c")
    scene.turn(2)
    new = scene.replicas[1]
    old.answers_after = new.answers_after = 2
    scene.worker.revoked([P0])
    assert scene.versions == {"a": "1", "b": "1", "c": "2"}
    assert scene.broker.committed == {P0: 3}
    assert old.stopped


def test_a_broken_model_has_its_next_try_as_soon_as_another_one_serves() -> None:
    scene = Scene()
    scene.publish("a")
    scene.turn(2)
    scene.replicas[0].finish(unsound="its weights are gone")
    scene.turn(3)
    assert scene.worker._breakers.is_open("model")
    assert not scene.replicas[0].jobs
    scene.worker._breakers.began("model", scene.clock())
    scene.reload(model__version="2")
    scene.get_ready()
    scene.turn(3, 0.001)
    assert len(scene.replicas[1].jobs) == 1
    scene.replicas[1].finish()
    scene.turn(3)
    assert scene.versions == {"a": "2"}
    assert not scene.worker._breakers


# ---------------------------------------------------------------------- requests that were made for one version


def test_requests_that_name_a_version_are_never_run_by_another() -> None:
    scene = Scene(batch__max_batch_size=1)
    [old] = scene.replicas
    scene.publish("a", "b")
    scene.turn(2)
    scene.publish("late", version="1")
    scene.publish("any")
    scene.turn(2)
    scene.reload(model__version="2")
    scene.get_ready()
    scene.turn(3)
    scene.publish("new", version="2")
    scene.publish("gone", version="1")
    scene.turn(3)
    for _ in range(4):
        for fake in scene.replicas:
            if fake.jobs:
                fake.finish()
        scene.turn(3)
    assert scene.versions == {"a": "1", "b": "1", "late": "2", "any": "2", "new": "2", "gone": "2"}
    assert {name: code for name, code in scene.codes.items() if code == "unknown_model"} == {
        "late": "unknown_model",
        "gone": "unknown_model",
    }
    assert old.stopped
    assert scene.broker.committed == {P0: 6}


def test_a_request_that_names_a_version_is_not_run_by_the_next_when_its_replica_dies() -> None:
    scene = Scene()
    scene.publish("a", version="1")
    scene.publish("b")
    scene.turn(2)
    old = scene.replicas[0]
    scene.reload(model__version="2")
    scene.get_ready()
    scene.turn(2)
    old.die()
    for _ in range(4):
        scene.turn(3)
        if scene.replicas[1].jobs:
            scene.replicas[1].finish()
    assert scene.codes == {"a": "unknown_model", "b": "model_error"}
    assert scene.versions["b"] == "2"
    assert not scene.pool.leftovers.held
    assert scene.broker.committed == {P0: 2}


class Prepares(Scene):
    """The same with a preparer per version; `prepare` and `run` let the oldest request through."""

    def __init__(self, **values: Any) -> None:
        super().__init__(prepares=True, inference__executor="process", inference__prepare_workers=1, **values)

    def prepare(self, fake: FakeReplica) -> None:
        """Let a preparer be done: its slot has what it was given, and that is what it gives."""
        from forebay.inference.messages import Part, Placed

        job = fake.jobs[0]
        [place] = job.inputs
        parts = [Part([n], [Placed(place.offset + 16 * n, 16, [1, 4])]) for n in range(job.requests)]
        fake.finish(parts=parts, mistakes=[])
        self.turn(3)


def test_what_the_old_preparer_made_is_made_again_by_the_new_one() -> None:
    scene = Prepares(batch__max_batch_size=1)
    scene.publish("a", "b", "c")
    scene.turn(3)
    old, preparer = scene.replicas[0], scene.preparers[0]
    while preparer.jobs:
        scene.prepare(preparer)
    assert len(old.jobs) == 2  # a and b run, c is prepared and waits
    scene.publish("d")
    scene.turn(3)
    assert len(preparer.jobs) == 1
    scene.reload(model__version="2")
    scene.get_ready()
    scene.turn(3)
    new, fresh = scene.replicas[1], scene.preparers[1]
    assert preparer.stopped
    assert (len(old.jobs), len(new.jobs)) == (2, 0)
    assert sum(job.requests for job in fresh.jobs) == 2  # c once more, and d
    while fresh.jobs:
        scene.prepare(fresh)
    for fake in (old, old, new, new):
        fake.finish()
        scene.turn(3)
    assert scene.versions == {"a": "1", "b": "1", "c": "2", "d": "2"}
    assert scene.broker.committed == {P0: 4}


def test_what_a_retired_replica_drops_is_prepared_again_before_the_new_one_runs_it() -> None:
    scene = Prepares()
    scene.publish("a", "b")
    scene.turn(3)
    scene.prepare(scene.preparers[0])
    old = scene.replicas[0]
    assert len(old.jobs) == 1
    scene.reload(model__version="2")
    scene.get_ready()
    scene.turn(3)
    new, fresh = scene.replicas[1], scene.preparers[1]
    old.die()
    scene.turn(3)
    assert not new.jobs
    while fresh.jobs:
        scene.prepare(fresh)
    for _ in range(4):
        if new.jobs:
            new.finish(mistakes=[Mistake(n, "model_error", "done") for n in range(new.jobs[0].requests)])
        scene.turn(3)
    assert scene.versions == {"a": "2", "b": "2"}
    assert not scene.pool.leftovers.held
