"""A worker on the fake accelerator: memory that runs out, a device that is lost, one that hangs, one that is not there.

Everything but the device is real: Kafka, the worker, its replica's process and what kills and replaces it.
"""

from __future__ import annotations

from pathlib import Path

from tests.integration.job import Job, ask, check_answers, check_once, error_code, magic

LOST, HUNG = 7_777, 8_888
"""First numbers of the rows at which the device fails."""


def launches(trace: Path) -> list[str]:
    """Return what happened on the device, in order."""
    return trace.read_text().splitlines()


def overlapped(events: list[str]) -> int:
    """Count the launches that came before the launch in front of them was computed."""
    computed: set[str] = set()
    count = 0
    for event in events:
        kind, number, *_ = [*event.split(), "", ""]
        if kind == "computed":
            computed.add(number)
        elif kind == "launch" and int(number) > 1 and str(int(number) - 1) not in computed:
            count += 1
    return count


def test_batches_overlap_and_every_answer_is_right(job: Job, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    job.send(ask(n, 1 + n % 3) for n in range(2_000))
    worker = job.start(
        model__factory="tests.models:Plain",
        inference__device=f"fake:0?ticks=30&trace={trace}",
        batch__max_batch_size=16,
    )
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(2_000)))
    check_answers(outcomes, {n: 1 + n % 3 for n in range(2_000)})
    assert overlapped(launches(trace)) > 10
    [ready] = worker.events("replica_ready")
    assert ready["device"] == "fake accelerator 0"
    assert worker.metric("forebay_replica_memory_bytes", kind="staging") > 0
    assert worker.metric("forebay_batch_peak_bytes", rows="16") > 0
    assert worker.metric("forebay_self_check_difference") <= 1e-5
    assert worker.stop() == 0


def test_memory_for_16_rows_is_learnt_once_and_costs_no_replica(job: Job, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    job.send(ask(n) for n in range(3_000))
    worker = job.start(
        model__factory="tests.models:Plain",
        inference__device=f"fake?memory=16rows&trace={trace}",
        batch__max_batch_size=32,
    )
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(3_000)))
    check_answers(outcomes)
    assert worker.metric("forebay_replica_restarts_total") == 0
    assert sum(event.startswith("refuse") for event in launches(trace)) <= 3  # at the start, and a probe
    [ready] = worker.events("replica_ready")
    assert any("the cap is 16" in note for note in ready["notes"])


def test_rows_that_lose_the_device_or_hang_it_are_poisoned_and_their_neighbours_are_not(job: Job) -> None:
    bad = {"lost": LOST, "hung": HUNG}
    sends = [ask(n) for n in range(150)]
    for place, (name, value) in enumerate(bad.items()):
        sends.insert(40 * place + 20, magic(name, value))
    job.send(sends)
    worker = job.start(
        model__factory="tests.models:Plain",
        inference__device=f"fake:0?sticky={LOST}&hang={HUNG}",
        inference__execution_timeout_ms=1_000,
        inference__max_restarts=20,
        batch__max_batch_size=16,
        delivery__max_attempts=2,
    )
    outcomes = job.await_settled(240)
    check_once(outcomes, [*map(str, range(150)), *bad])
    good = [outcome for outcome in outcomes if (outcome.key or b"").isdigit()]
    check_answers(good)
    assert {error_code(outcome) for outcome in outcomes if outcome not in good} == {"poisoned"}
    reasons = {letter.key: letter.header("kafka_dlt-exception-message") or b"" for letter in job.dead_letters()}
    assert b"code 75" in reasons[b"lost"]
    assert b"inference.execution_timeout_ms" in reasons[b"hung"]
    assert worker.metric("forebay_rebalances_total") == 1
    assert len(worker.replicas()) == 1
    assert worker.stop() == 0


def test_a_device_that_is_lost_again_and_again_ends_the_worker_with_code_75(job: Job) -> None:
    job.send(magic(f"lost-{n}", LOST) for n in range(5))
    worker = job.launch(
        model__factory="tests.models:Plain",
        inference__device=f"fake?sticky={LOST}",
        inference__max_restarts=1,
        batch__max_batch_size=1,
    )
    assert worker.wait() == 75, worker.text()
    assert "Traceback" not in worker.text()
    assert "the device is lost" in worker.text()
    assert job.answered() == 0
    assert not any(job.kafka.committed_offsets(job.group, job.requests).values())


def test_a_cuda_device_that_is_not_there_stops_the_start_and_nothing_falls_back_to_the_cpu(job: Job) -> None:
    job.send([ask(1)])
    worker = job.launch(inference__device="cuda:63")
    assert worker.wait() == 78, worker.text()
    assert "inference.device is cuda:63, but" in worker.text().strip().splitlines()[-1]
    assert job.answered() == 0


def test_a_model_that_mixes_its_rows_never_answers_anybody(job: Job) -> None:
    job.send([ask(1)])
    worker = job.launch(model__factory="tests.models:Mixes")
    assert worker.wait() == 78, worker.text()
    last = worker.text().strip().splitlines()[-1]
    assert "rows influence each other" in last
    assert "inference.self_check" in last
    assert job.answered() == 0
