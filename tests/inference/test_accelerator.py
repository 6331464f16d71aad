"""The code for accelerators, on the fake one: streams, events, memory and loss, the same in every run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch

from forebay import Model, TensorSpec
from forebay.errors import ConfigError
from forebay.inference.devices import Accelerator, Device, open_device, resolve
from forebay.inference.devices.fake import FakeBackend, FakeOptions, parse
from forebay.inference.example import DeviceLost
from forebay.inference.matching import finished
from forebay.inference.messages import Done, Skip, decode_to_loop, encode
from forebay.inference.pipeline import HungUpError, Inbox, Pipeline
from forebay.records import Code, Request
from tests.inference.models import Echo, InPlace, Padded, Prepared, Sums, Words
from tests.inference.test_runner import Answers, Bench, check_innocents, ids, lines, numbers, ordinary
from tests.unit.builders import request
from tests.unit.marks import CRASH, NOT_A_NUMBER, POISON

HANG, STICKY = -8.0, -9.0


def accelerator(options: str = "") -> Accelerator:
    device = open_device(f"fake:0?{options}")
    assert isinstance(device, Accelerator)
    return device


def fake(device: Device) -> FakeBackend:
    assert isinstance(device, Accelerator)
    assert isinstance(device.backend, FakeBackend)
    return device.backend


def traced(device: Device) -> list[str]:
    return list(fake(device).trace)


class Wide(Model):
    """Makes 4 KB per row on its way to one number per row."""

    inputs = (TensorSpec("x", "FP32", [-1, 4]),)
    outputs = (TensorSpec("y", "FP32", [-1]),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True).expand(-1, 1_024).contiguous().mean(1)


# ---------------------------------------------------------------------- its name


def test_nothing_but_its_name_leads_to_the_fake() -> None:
    assert not isinstance(open_device("auto"), Accelerator)
    assert not isinstance(open_device("cpu"), Accelerator)
    assert open_device("fake").name == "fake accelerator 0"
    assert open_device("fake:3").name == "fake accelerator 3"
    assert resolve("fake:3?ticks=1") == torch.device("cpu")


def test_its_options_are_read_from_its_name() -> None:
    assert parse("fake:2?memory=16rows&ticks=5&sticky=-9&hang=-8.5&pin=no&trace=log") == FakeOptions(
        index=2, rows=16, ticks=5, sticky=-9.0, hang=-8.5, pins=False, trace="log"
    )
    assert parse("fake?memory=4MiB").memory == 4 * 2**20
    assert parse("fake?memory=1000").memory == 1_000


@pytest.mark.parametrize(
    "name", ["fake:x", "fake:", "fake?memory=much", "fake?memory=4TB", "fake?speed=9", "fake?pin=maybe", "fake?ticks=a"]
)
def test_an_option_that_is_not_understood_is_refused_with_what_there_is(name: str) -> None:
    if name == "fake:":
        assert parse(name).index == 0
        return
    with pytest.raises(ConfigError, match=r"inference\.device.*memory \(16rows, 4MiB\)"):
        open_device(name)


# ---------------------------------------------------------------------- what runs on the CPU runs here


@pytest.mark.parametrize("options", ["", "ticks=1", "pin=no", "memory=1GiB"])
def test_every_request_gets_its_own_rows(options: str) -> None:
    bench = Bench(Sums(), device=accelerator(options))
    for turn in range(4):
        answers = bench.run(numbers("a", turn), numbers("b", 2, 3, 4), numbers("c", 5))
        assert [answers.floats(name) for name in "abc"] == [[turn + 1], [3, 4, 5], [6]]
        assert answers.executions == 1


def test_guilty_requests_are_found_and_the_others_get_their_results() -> None:
    answers = Bench(Sums(), device=accelerator()).run(*ordinary(32, {11: POISON, 20: NOT_A_NUMBER}))
    check_innocents(answers, 32, {11, 20})
    assert answers.failures["20"].code is Code.NON_FINITE_OUTPUT


def test_a_model_that_writes_into_its_input_spoils_no_second_try() -> None:
    answers = Bench(InPlace(), device=accelerator()).run(*ordinary(8, {5: NOT_A_NUMBER}))
    check_innocents(answers, 8, {5}, scale=10)


def test_text_padding_and_prepare_come_through() -> None:
    content = np.arange(3, dtype="<i8").tobytes()
    words = request("w", rows=3, tensors=[[b"a", b"b", b"c"], content], shapes=[(3,), (3,)])
    answers = Bench(Words(), device=accelerator()).run(words)
    assert answers.results["w"] == [[b"", b"b", b"cc"], np.array([0, 2, 4], "<i8").tobytes()]
    answers = Bench(Padded(), device=accelerator()).run(ids("a", [1, 2]), ids("b", [3, 4, 5]))
    assert (answers.ints("a"), answers.ints("b")) == ([1, 2, -1], [3, 4, 5])
    answers = Bench(Prepared(), device=accelerator()).run(lines("a", b"1 2 3"), lines("bad", b"one"), lines("c", b"3"))
    assert (answers.ints("a"), answers.ints("c"), set(answers.failures)) == ([6], [3], {"bad"})


def test_a_request_larger_than_a_batch_runs_in_pieces_and_is_one_result() -> None:
    bench = Bench(Sums(), limit=8, device=accelerator())
    answers = bench.run(numbers("big", *range(20)))
    assert answers.floats("big") == [float(n + 1) for n in range(20)]
    assert (answers.executions, bench.timings[0].pieces) == (3, 3)


# ---------------------------------------------------------------------- streams and events


def test_the_fake_shows_a_forward_that_does_not_wait_for_its_input() -> None:
    backend = FakeBackend(FakeOptions())
    incoming, compute = backend.stream(), backend.stream()
    with backend.on(incoming):
        there = backend.fetch(torch.ones(4))
    with backend.computing(compute):
        assert not torch.equal(there, torch.ones(4))
    event = backend.event()
    event.record(incoming)
    compute.wait_event(event)
    with backend.computing(compute):
        assert torch.equal(there, torch.ones(4))


@pytest.mark.parametrize(("waits", "keeps"), [(True, True), (False, True), (True, False)])
def test_the_fake_shows_a_result_that_is_fetched_too_early_or_dropped_too_early(waits: bool, keeps: bool) -> None:
    backend = FakeBackend(FakeOptions())
    compute, outgoing = backend.stream(), backend.stream()
    place = torch.zeros(4)
    with backend.computing(compute):
        result: Any = torch.ones(4) * 2
    if waits:
        computed = backend.event()
        computed.record(compute)
        outgoing.wait_event(computed)
    with backend.on(outgoing):
        backend.store(result, place)
    if not keeps:
        del result
    backend.settle()
    assert torch.equal(place, torch.full((4,), 2.0)) is (waits and keeps)


def test_the_fake_shows_a_slot_that_is_written_while_the_device_reads_it() -> None:
    backend = FakeBackend(FakeOptions())
    incoming, compute, slot = backend.stream(), backend.stream(), torch.ones(4)
    with backend.on(incoming):
        backend.fetch(slot)
    event = backend.event()
    event.record(incoming)
    compute.wait_event(event)
    with backend.computing(compute):
        pass
    slot.fill_(3)
    with pytest.raises(RuntimeError, match="a slot was written"):
        backend.settle()


def test_nothing_lands_before_somebody_has_looked_often_enough() -> None:
    bench = Bench(Sums(), device=accelerator("ticks=5"))
    flight = bench.runner.begin(bench.submit(ordinary(2)))
    looks = 1
    while not bench.runner.is_done(flight):
        looks += 1
    assert looks == 6  # five to compute, the first of them while the input came in; one out
    back = finished(bench.replica, bench.runner.finish(flight), 0.0)
    assert [np.frombuffer(output.content, "<f4").tolist() for _, (output,) in back.results] == [[1, 2]]


def test_the_next_batch_is_launched_while_the_one_before_it_computes() -> None:
    device = accelerator("ticks=5")
    bench = Bench(Sums(), device=device)
    first = bench.runner.begin(bench.submit([numbers("a", 1)]))
    second = bench.runner.begin(bench.submit([numbers("b", 2, 3)]), beside=True)
    assert not bench.runner.is_done(first)
    outcomes = [finished(bench.replica, bench.runner.finish(flight), 0.0) for flight in (first, second)]
    values = [np.frombuffer(back.results[0][1][0].content, "<f4").tolist() for back in outcomes]
    assert values == [[2], [3, 4]]
    assert traced(device) == ["launch 1 rows 1", "launch 2 rows 2", "computed 1", "computed 2"]


# ---------------------------------------------------------------------- memory


def test_a_cap_is_learnt_used_and_probed() -> None:
    """S15: 16 rows fit. The first batch of 32 costs 3 executions, the second 2; after 200 clean ones 18 are probed."""
    device = accelerator("memory=16rows")
    bench = Bench(Sums(), device=device)
    answers = bench.run(*ordinary(32))
    check_innocents(answers, 32, set())
    assert answers.executions == 3
    for _ in range(200):
        answers = bench.run(*ordinary(32))
        assert answers.executions == 2
    check_innocents(answers, 32, set())
    assert traced(device).count("empty_cache") == 1
    fake(device).trace.clear()
    answers = bench.run(*ordinary(32))
    check_innocents(answers, 32, set())
    launched = [event for event in traced(device) if not event.startswith("computed")]
    assert launched[0] == "refuse 18"
    assert launched[1] == "empty_cache"
    assert sum("refuse" in event for event in launched) == 1
    assert bench.run(*ordinary(32)).executions == 2


def test_a_probe_that_fits_raises_the_cap() -> None:
    device = accelerator("memory=24rows")
    bench = Bench(Sums(), device=device)
    for _ in range(201):
        bench.run(*ordinary(32))
    fake(device).trace.clear()
    bench.run(*ordinary(32))
    assert [event for event in traced(device) if "launch" in event] == ["launch 403 rows 18", "launch 404 rows 14"]


def test_the_loop_is_told_the_cap_and_why_there_was_more_than_one_execution() -> None:
    bench = Bench(Sums(), device=accelerator("memory=16rows"))
    bench.run(*ordinary(16))
    assert (bench.timings[-1].cap, bench.timings[-1].pieces) == (None, 0)
    bench.run(*ordinary(32))
    assert (bench.timings[-1].cap, bench.timings[-1].pieces, bench.timings[-1].executions) == (16, 0, 3)
    bench.run(*ordinary(32))
    assert (bench.timings[-1].cap, bench.timings[-1].pieces, bench.timings[-1].executions) == (16, 2, 2)


def test_a_cap_of_one_bucket_is_none_of_a_smaller_one() -> None:
    bench = Bench(Wide(), device=accelerator("memory=100000"))
    job = bench.submit(ordinary(32), bucket=64)
    assert bench.runner.run(job).cap == 16
    finished_slots(bench)
    job = bench.submit(ordinary(16), bucket=8)
    assert bench.runner.run(job).cap == 0


def finished_slots(bench: Bench) -> None:
    bench.replica.running.clear()
    bench.staging.reset()


def test_the_halves_of_a_batch_that_did_not_fit_have_the_memory_to_themselves() -> None:
    """With 16 rows' worth of bytes, a failed batch of 32 that anything still holds leaves too little for its halves."""
    device = accelerator("memory=70000")
    bench = Bench(Wide(), device=device)
    answers = bench.run(*ordinary(32))
    check_innocents(answers, 32, set())
    assert answers.executions == 3
    gc.collect()
    assert fake(device).allocator.live == 0


def test_an_exception_that_holds_its_batch_in_a_cycle_is_cleared_away() -> None:
    class Keeps(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return super().forward(x)
            except RuntimeError as error:
                cycle: list[Any] = [error]
                cycle.append(cycle)
                raise

    gc.disable()
    try:
        answers = Bench(Keeps(), device=accelerator("memory=70000")).run(*ordinary(32))
    finally:
        gc.enable()
    assert answers.executions == 3


def test_a_row_that_does_not_fit_alone_is_exhausted_and_may_be_sent_again() -> None:
    answers = Bench(Wide(), device=accelerator("memory=1000")).run(*ordinary(2))
    assert {failure.code for failure in answers.failures.values()} == {Code.RESOURCE_EXHAUSTED}
    assert all(failure.retriable for failure in answers.failures.values())


def test_memory_that_only_the_batch_in_front_took_is_no_cap() -> None:
    device = accelerator("memory=60000")
    bench = Bench(Echo(lambda x: x.repeat(1, 256), TensorSpec("y", "FP32", [-1, 1_024])), device=device)
    first = bench.runner.begin(bench.submit(ordinary(8)))
    second = bench.runner.begin(bench.submit(ordinary(8)), beside=True)
    assert "refuse 8" in traced(device)
    for flight in (first, second):
        back = finished(bench.replica, bench.runner.finish(flight), 0.0)
        assert (back.failures, back.timings.cap) == ([], None)
    assert bench.runner._crowded
    for _ in range(200):
        bench.run(*ordinary(1))
    assert not bench.runner._crowded


def test_batches_of_any_size_leave_no_memory_behind() -> None:
    device = accelerator("memory=140000")
    bench = Bench(Wide(), device=device)
    bench.run(*ordinary(32))
    highest = fake(device).allocator.highest
    sizes = np.random.default_rng(1).integers(1, 33, 200)
    for size in [*sizes, 32]:
        bench.run(*ordinary(int(size)))
    assert fake(device).allocator.refused == 0
    assert fake(device).allocator.reserved <= 1.3 * highest
    assert fake(device).allocator.live == 0


def test_a_share_of_the_memory_is_all_that_there_is() -> None:
    device = open_device("fake?memory=100000", 0.5)
    assert device.memory()["device_total"] == 50_000


# ---------------------------------------------------------------------- the slot's room


def test_outputs_that_do_not_fit_into_a_slot_cost_their_executions_once() -> None:
    """A batch whose outputs never fitted the slot cost four executions every time."""
    spec = TensorSpec("y", "FP32", [-1, 1_024])
    bench = Bench(Echo(lambda x: x.sum(1, keepdim=True).expand(-1, 1_024), spec), outputs=40_000)
    executions = [bench.run(*ordinary(32)).executions for _ in range(3)]
    assert executions == [5, 4, 4]  # nine rows fit
    assert bench.timings[-1].cap == 9
    answers = bench.run(*ordinary(9))
    assert answers.executions == 1
    assert answers.floats("8") == [9.0] * 1_024


def test_one_large_output_leaves_no_cap_behind() -> None:
    def answer(x: torch.Tensor) -> list[bytes]:
        return [b"x" * (100_000 if float(row[0]) == 2 else 10) for row in x]

    bench = Bench(Echo(answer, TensorSpec("y", "BYTES", [-1])))
    bench.run(*ordinary(8))
    ordinary_ones = [numbers(str(n), 100.0 + n) for n in range(8)]
    assert bench.run(*ordinary_ones).executions == 1


# ---------------------------------------------------------------------- loss


@pytest.mark.parametrize(
    ("options", "model", "mark"),
    [(f"sticky={STICKY}", Sums, STICKY), ("", Sums, CRASH)],
    ids=["found out later, at an event", "found out at once"],
)
def test_a_device_that_is_lost_is_nobodys_error(options: str, model: Callable[[], Model], mark: float) -> None:
    bench = Bench(model(), device=accelerator(options))
    with pytest.raises(DeviceLost, match="assert"):
        bench.run(*ordinary(4, {1: mark}))


def test_a_lost_device_stays_lost() -> None:
    bench = Bench(Sums(), device=accelerator(f"sticky={STICKY}"))
    with pytest.raises(DeviceLost):
        bench.run(numbers("a", STICKY))
    with pytest.raises(DeviceLost):
        bench.run(numbers("b", 1))


def test_what_landed_before_the_device_was_lost_counts() -> None:
    bench = Bench(Sums(), device=accelerator(f"sticky={STICKY}&ticks=3"))
    first = bench.runner.begin(bench.submit([numbers("a", 1)]))
    second = bench.runner.begin(bench.submit([numbers("b", STICKY)]), beside=True)
    back = finished(bench.replica, bench.runner.finish(first), 0.0)
    assert [np.frombuffer(output.content, "<f4").tolist() for _, (output,) in back.results] == [[2]]
    with pytest.raises(DeviceLost):
        bench.runner.finish(second)


def test_a_hang_is_never_done() -> None:
    bench = Bench(Sums(), device=accelerator(f"hang={HANG}"))
    flight = bench.runner.begin(bench.submit([numbers("a", HANG)]))
    assert not any(bench.runner.is_done(flight) for _ in range(1_000))


def test_staging_memory_that_cannot_be_page_locked_is_noted_and_works() -> None:
    device = accelerator("pin=no")
    bench = Bench(Sums(), device=device)
    assert "page-locked" in str(device.pin(bench.staging.map))
    answers: Answers = bench.run(*ordinary(4))
    check_innocents(answers, 4, set())


def test_the_device_reports_what_its_allocator_has() -> None:
    device = accelerator("memory=100000")
    bench = Bench(Wide(), device=device)
    requests: list[Request] = ordinary(4)
    bench.run(*requests)
    memory = bench.done.memory  # type: ignore[union-attr]
    assert memory["device_total"] == 100_000
    assert memory["reserved"] > 4 * 4_096
    assert memory["staging"] == len(bench.staging.map)
    assert memory["resident"] > 0


# ---------------------------------------------------------------------- the order of batches


def test_a_batch_that_waits_is_launched_before_the_one_in_front_is_answered() -> None:
    device = accelerator("ticks=50")
    bench = Bench(Sums(), device=device)
    ours, theirs = Pipe()
    pipeline = Pipeline(bench.runner, Inbox(theirs))
    for number in (0, 10):
        ours.send_bytes(encode(bench.submit([numbers("a", number), numbers("b", number + 1)])))
    pipeline.turn()
    assert traced(device) == ["launch 1 rows 2"]
    pipeline.turn()
    assert traced(device) == ["launch 1 rows 2", "launch 2 rows 2", "computed 1"]
    pipeline.turn()
    assert traced(device)[3:] == ["computed 2"]
    values = []
    for _ in range(2):
        done = decode_to_loop(ours.recv_bytes())
        assert isinstance(done, Done)
        back = finished(bench.replica, done, 0.0)
        values.append(np.frombuffer(back.results[0][1][0].content, "<f4").tolist())
    assert values == [[1, 2], [11, 12]]
    ours.close()
    with pytest.raises(HungUpError):
        pipeline.turn()


def test_a_skip_that_comes_behind_its_batch_takes_rows_out_of_it() -> None:
    bench = Bench(Sums())
    ours, theirs = Pipe()
    pipeline = Pipeline(bench.runner, Inbox(theirs))
    ours.send_bytes(encode(bench.submit([numbers("running", 0)])))
    pipeline.turn()
    ours.send_bytes(encode(bench.submit([numbers("a", 1), numbers("late", 2), numbers("b", 3)])))
    ours.send_bytes(encode(Skip(1, [1])))
    for _ in range(3):
        pipeline.turn()
    assert bench.model.calls == [1, 2]  # type: ignore[attr-defined]


def test_the_cpu_answers_a_batch_before_it_begins_the_next() -> None:
    bench = Bench(Sums())
    ours, theirs = Pipe()
    pipeline = Pipeline(bench.runner, Inbox(theirs))
    for number in (0, 10):
        ours.send_bytes(encode(bench.submit([numbers("a", number)])))
    pipeline.turn()
    pipeline.turn()
    assert ours.poll(0)
    assert bench.model.calls == [1]  # type: ignore[attr-defined]
