"""Replicas that compute wrongly: canaries find the idle ones, doubts those whose batches fail where others work."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay import TensorSpec
from forebay.errors import DeviceLostError, ModelError
from forebay.inference.canary import BLIND, VARIES, Canary
from forebay.inference.matching import Finished
from forebay.inference.messages import Checked, Done, Failed, Run
from forebay.inference.pool import Limits, Pool
from forebay.inference.replicas import Replica, State
from forebay.inference.staging import Staging
from tests.inference.models import Echo, Fragile, Padded, Sums, Words
from tests.inference.test_accelerator import accelerator, fake
from tests.inference.test_runner import Bench, numbers
from tests.unit.fakes import SIZE
from tests.unit.test_pool import Scene as PlainScene

INTERVAL = 10.0


class Scene(PlainScene):
    """A pool of fakes that are checked when idle."""

    def __init__(self, replicas: int = 1, *, interval: float = INTERVAL, max_restarts: int = 5) -> None:
        super().__init__(replicas, max_restarts=max_restarts)
        limits = Limits(30.0, 60.0, 3, max_restarts, interval)
        made = [
            Replica(f"r{n}", self.pool._replicas[n]._start, fake, Staging(SIZE, 2)) for n, fake in enumerate(self.fakes)
        ]
        self.pool = Pool(made, limits, count(100))
        self.pool.launch(self.now)
        for fake_replica in self.fakes:
            fake_replica.get_ready()
        self.collect()
        self.pool.notices.clear()

    def look(self, seconds: float = 0.0, *spared: str) -> list[Finished]:
        self.now += seconds
        self.pool.check_idle(self.now, lambda model: model in spared)
        return self.pool.collect(self.now)

    def checks(self, number: int = 0) -> list[Run]:
        return [job for job in self.fakes[number].jobs if job.check]

    def answer(self, number: int = 0, **what: Any) -> list[Finished]:
        """Let a replica answer its canary."""
        job = self.fakes[number].jobs.popleft()
        assert job.check
        self.fakes[number].say(Checked(job.number, **what))
        return self.collect()

    @property
    def results(self) -> list[object]:
        return [notice.fields["result"] for notice in self.pool.notices if notice.event == "replica_checked"]

    @property
    def lost(self) -> list[str]:
        return [str(notice.fields["why"]) for notice in self.pool.notices if notice.event == "replica_lost"]


def ids(backs: list[Finished]) -> list[str]:
    return [one.id for back in backs for one, _ in back.failures]


# ---------------------------------------------------------------------- canaries


def test_an_idle_replica_is_checked_once_per_interval() -> None:
    scene = Scene()
    scene.look(9.9)
    assert not scene.checks()
    scene.look(1.1)
    assert len(scene.checks()) == 1
    scene.look(INTERVAL)
    assert len(scene.checks()) == 1  # it has not answered yet
    scene.answer()
    scene.look(9.0)
    assert not scene.checks()
    scene.look(2.0)
    assert len(scene.checks()) == 1
    assert scene.results == ["ok"]
    assert scene.pool.in_flight == 0


@pytest.mark.parametrize("why", ["busy", "switched off", "spared"])
def test_a_replica_is_not_checked_that_has_something_better_to_do(why: str) -> None:
    scene = Scene(interval=0.0 if why == "switched off" else INTERVAL)
    for _ in range(8):
        if why == "busy":
            scene.submit("a")
            scene.fakes[0].finish()
        scene.look(6.0, *(["model"] if why == "spared" else []))
        assert not scene.checks()


def test_a_request_that_comes_while_a_canary_runs_is_staged_behind_it_at_once() -> None:
    scene = Scene()
    scene.look(11)
    assert scene.pool.is_checking
    assert scene.pool.free_at("model") == 0.0
    scene.submit("a")
    scene.answer()
    assert not scene.pool.is_checking
    scene.fakes[0].finish()
    assert ids(scene.collect()) == ["a"]


def test_a_batch_goes_to_a_replica_without_a_canary_where_there_is_one() -> None:
    scene = Scene(2)
    scene.look(11)
    scene.answer(1)
    scene.submit("a")
    assert [len(fake.jobs) for fake in scene.fakes] == [1, 1]
    assert not scene.checks(1)


def test_a_wrong_answer_replaces_the_replica_and_what_waited_behind_runs_elsewhere() -> None:
    scene = Scene()
    scene.look(11)
    batch = scene.submit("a", "b")
    scene.answer(wrong="it answers otherwise")
    assert scene.pool.restarts == 1
    assert "it answers otherwise" in scene.lost[0]
    assert scene.results == ["wrong"]
    scene.collect(1.0)
    scene.fakes[0].get_ready()
    scene.collect()
    scene.fakes[0].finish()
    assert ids(scene.collect()) == ["a", "b"]
    assert [one.attempts for one in batch.requests] == [0, 0]


def test_a_canary_that_hangs_or_kills_replaces_the_replica_and_nobody_is_suspect() -> None:
    for hangs in (True, False):
        scene = Scene()
        scene.look(11)
        scene.submit("a", "b")
        if not hangs:
            scene.fakes[0].die()
        scene.collect(31 if hangs else 0)
        assert scene.pool.restarts == 1
        assert scene.lost[0].startswith("its canary took longer" if hangs else "it was ended by signal")
        assert not scene.pool.leftovers.has_accused
        scene.collect(1.0)
        scene.fakes[0].get_ready()
        scene.collect()
        assert scene.fakes[0].jobs[0].requests == 2


def test_an_error_replaces_one_of_several_at_once_and_the_only_one_the_second_time() -> None:
    several = Scene(2)
    several.look(11)
    several.answer(0, failed="no such kernel")
    assert several.pool.restarts == 1
    alone = Scene()
    alone.look(11)
    alone.answer(failed="its service is down")
    assert alone.pool.restarts == 0
    alone.look(11)
    alone.answer(failed="its service is down")
    assert alone.pool.restarts == 1
    assert alone.results == ["failed", "failed"]


def test_replicas_after_a_wrong_answer_are_told_what_it_was_at_the_start_and_no_others() -> None:
    scene = Scene()
    scene.fakes[0].die()
    scene.collect()
    scene.now += 1
    scene.collect()
    assert scene.fakes[0].started.known == []
    scene.fakes[0].get_ready(answer=[b"right"])
    scene.collect()
    scene.look(11)
    scene.answer(wrong="it answers otherwise")
    scene.collect(60)
    assert scene.fakes[0].started.known == [b"right"]
    scene.fakes[0].say(Failed("it answers otherwise than the replicas before it"))
    scene.collect()
    assert "otherwise than the replicas before it" in scene.lost[-1]
    scene.collect(60)
    scene.fakes[0].get_ready(answer=[b"other"])
    scene.collect()
    scene.look(11)
    scene.answer(wrong="it answers otherwise")
    scene.collect(60)
    assert scene.fakes[0].started.known == [b"right"]


def test_errors_with_a_success_between_them_replace_nobody() -> None:
    scene = Scene()
    for failed in ("down", "", "down", "", "down"):
        scene.look(11)
        scene.answer(failed=failed)
    assert scene.pool.restarts == 0


def test_a_canary_that_works_forgives_no_deaths() -> None:
    scene = Scene(max_restarts=2)
    for _ in range(2):
        scene.fakes[0].die()
        scene.collect()
        scene.collect(60)
        scene.fakes[0].get_ready()
        scene.collect()
        scene.look(11)
        scene.answer()
    scene.fakes[0].die()
    with pytest.raises(DeviceLostError):
        scene.collect()


# ---------------------------------------------------------------------- doubts


def test_a_replica_that_fails_its_example_is_replaced_once_another_has_answered_its_batch() -> None:
    scene = Scene(2)
    scene.submit("a", "b")
    scene.fakes[0].finish(unsound="its weights are gone")
    assert scene.collect() == []
    assert scene.pool.restarts == 0
    assert scene.fakes[1].jobs[0].requests == 2
    assert scene.pool.in_flight == 2
    scene.fakes[1].finish()
    assert ids(scene.collect()) == ["a", "b"]
    assert scene.pool.restarts == 1
    assert "its weights are gone" in scene.lost[0]
    assert scene.pool._replicas[0].state is not State.READY


def test_a_doubted_replica_gets_nothing() -> None:
    scene = Scene(2)
    scene.submit("a")
    scene.fakes[0].finish(unsound="broken")
    scene.collect()
    scene.submit("b")
    assert not scene.fakes[0].jobs
    assert len(scene.fakes[1].jobs) == 2
    assert scene.pool.free_at("model") is None


def test_what_others_ran_already_proves_nothing() -> None:
    """The model may have broken since."""
    scene = Scene(2)
    scene.submit("a")
    scene.submit("b")
    scene.fakes[0].finish(unsound="its service is down")
    scene.collect()
    scene.fakes[1].finish()
    assert ids(scene.collect()) == ["b"]
    assert scene.pool.restarts == 0
    scene.fakes[1].finish(unsound="its service is down")
    (back,) = scene.collect()
    assert (ids([back]), back.unsound) == (["a"], "its service is down")
    assert scene.pool.restarts == 0
    assert scene.pool.free_at("model") == 0.0


def test_a_batch_that_fails_at_every_replica_is_the_models_fault() -> None:
    scene = Scene(3)
    scene.submit("a")
    backs: list[Finished] = []
    for _ in range(3):
        (busy,) = [fake for fake in scene.fakes if fake.jobs]
        busy.finish(unsound="broken")
        backs += scene.collect()
    assert ids(backs) == ["a"]
    assert backs[0].unsound == "broken"
    assert scene.pool.restarts == 0
    assert all(replica.doubt is None for replica in scene.pool._replicas)


def test_the_only_replica_is_never_doubted() -> None:
    scene = Scene()
    scene.submit("a")
    scene.fakes[0].finish(unsound="broken")
    (back,) = scene.collect()
    assert back.unsound == "broken"


def test_a_replica_that_is_broken_again_and_again_waits_longer_each_time_while_others_work() -> None:
    scene = Scene(2)
    waits: list[float] = []
    for _ in range(5):
        scene.submit("a")
        scene.fakes[0].finish(unsound="broken")
        scene.collect()
        scene.fakes[1].finish()
        scene.collect()
        since, launches = scene.now, scene.fakes[0].launches
        while scene.fakes[0].launches == launches:
            scene.collect(0.5)
        waits.append(scene.now - since)
        scene.fakes[0].get_ready()
        scene.collect()
    assert waits == sorted(waits)
    assert waits[-1] == 8.0


# ---------------------------------------------------------------------- in the replica, on the fake accelerator


class Fickle(Sums):
    """Answers differently each time."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + len(self.calls)


def canary_of(bench: Bench) -> Canary:
    made = Canary(bench.runner, bench.model, bench.start, 1e-5)
    bench.runner.canary = made
    return made


def run(bench: Bench, canary: Canary) -> Checked:
    job = canary.stage(Run(77, 1, 1, [], [], [], check=True))
    assert job is not None
    assert (job.number, job.slot, job.check) == (77, 1, True)
    done: Done = bench.runner.run(job)
    return canary.judge(job, done)


def test_the_example_answers_as_it_did_until_the_device_corrupts_silently() -> None:
    bench = Bench(Sums(), device=accelerator("corrupt=-77"))
    canary = canary_of(bench)
    assert canary.record() == ""
    assert run(bench, canary) == Checked(77, memory=bench.runner._figures)
    bench.run(numbers("trigger", -77))
    assert fake(bench.device)._spoils is not None
    assert run(bench, canary).wrong
    assert bench.run(numbers("a", 2, 3)).floats("a") == [4.0, 5.0]  # one too large, and nothing else shows it


def test_a_device_that_makes_the_right_thing_of_zeros_is_seen_without_an_example() -> None:
    """A canary of zeros was blind to it."""
    bench = Bench(Sums(), device=accelerator("swell=-77"))
    canary = canary_of(bench)
    assert canary.record() == ""
    bench.run(numbers("trigger", -77))
    assert bench.run(numbers("zero", -1 / 3)).floats("zero")[0] == pytest.approx(1.0)  # all of it half too large
    assert run(bench, canary).wrong


def test_a_model_without_an_example_is_asked_the_same_random_numbers_in_every_process() -> None:
    one, other = (canary_of(Bench(Sums())) for _ in range(2))
    assert torch.equal(one._row["x"], other._row["x"])
    assert bool((one._row["x"] > 0).all())


def test_whole_numbers_stay_zero_where_no_self_check_has_tried_others() -> None:
    """They may index a table, and one too large takes a CUDA device down."""
    for self_check, largest in ((True, 1), (False, 0)):
        bench = Bench(Echo(lambda x: x.sum(1)), self_check=self_check)
        bench.runner.specs = [TensorSpec("x", "INT64", [-1, 64])]
        assert int(canary_of(bench)._row["x"].max()) == largest


def test_a_model_that_refuses_random_numbers_is_asked_zeros_and_it_is_said() -> None:
    def answer(x: torch.Tensor) -> torch.Tensor:
        if bool(x.any()):
            raise ValueError("zeros alone")
        return x.sum(1)

    canary = canary_of(Bench(Echo(answer)))
    assert canary.record() == BLIND
    assert not canary._row["x"].any()
    assert canary._known is not None


def test_a_model_that_answers_zeros_alike_is_said_to_be_hard_to_see() -> None:
    assert canary_of(Bench(Echo(lambda x: (x.sum(1) > 1e9).float()))).record() == BLIND
    assert canary_of(Bench(Echo(lambda x: x.sum(1)))).record() == ""


@pytest.mark.parametrize("make", [Sums, Words, Padded])
def test_a_later_replica_must_agree_where_one_computed_wrongly(make: Any) -> None:
    first = canary_of(Bench(make()))
    first.record()
    assert first.answer
    assert canary_of(Bench(make(), known=first.answer)).record() == first.record()
    spoilt = [bytes(255 - byte for byte in raw) or b"\1\0\0\0x" for raw in first.answer]
    with pytest.raises(ModelError, match="otherwise than the replicas before it"):
        canary_of(Bench(make(), known=spoilt)).record()


def test_a_model_that_answers_differently_each_time_is_never_wrong() -> None:
    bench = Bench(Fickle())
    canary = canary_of(bench)
    assert canary.record() == VARIES
    assert not run(bench, canary).wrong


def test_an_example_that_fails_says_how(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    bench = Bench(Fragile(str(broken)))
    canary = canary_of(bench)
    assert canary.record() == ""
    broken.write_text("")
    assert "the feature store does not answer" in run(bench, canary).failed
    broken.write_text("nan")
    assert "NaN" in run(bench, canary).failed


@pytest.mark.parametrize(("buckets", "length"), [([], 16), ([8, 64], 64), ([8], 16)])
def test_a_ragged_example_runs_in_a_bucket_where_there_is_one(buckets: list[int], length: int) -> None:
    canary = canary_of(Bench(Padded(), buckets=buckets))
    assert canary._row["ids"].shape == (1, length)
    assert canary.record() == ""
