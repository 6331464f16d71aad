"""The demo's summary is true: what it counts, what it calls right, what it says is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from examples.sample import Answer, Sample, cycled
from forebay.cli.demo_report import Arrival, Summary, summarise


def a_sample(name: str = "cat.png", right: str = "cat", original: bool = False) -> Sample:
    return Sample(name, f"a {right}", {"image": [b"file"]}, (right,), original)


def an_arrival(
    sample: Sample, label: str | None = "cat", latency_ms: float = 10.0, size: int = 1, sent_at: float = 0.0
) -> Arrival:
    answer = None if label is None else Answer(label, 0.9)
    error = None if answer else "model_error: no"
    return Arrival(sample, sample.original, sent_at, sent_at + latency_ms / 1000, size, answer, error)


def summed(samples: Sequence[Sample], arrivals: Sequence[Arrival], duplicates: int = 0) -> Summary:
    return summarise(samples, arrivals, duplicates, {"idle": 1}, "embedded")


def test_all_is_right_when_each_request_got_its_result_and_each_original_its_answer() -> None:
    samples = [a_sample(original=True), a_sample()]
    assert summed(samples, [an_arrival(sample) for sample in samples]).all_right


def test_a_variant_with_another_answer_is_counted_but_is_no_trouble() -> None:
    samples = [a_sample(original=True), a_sample()]
    summary = summed(samples, [an_arrival(samples[0]), an_arrival(samples[1], "dog")])
    assert summary.all_right
    assert summary.right == 1


def test_an_original_with_another_answer_is_trouble() -> None:
    sample = a_sample(original=True)
    assert summed([sample], [an_arrival(sample, "dog")]).troubles == ["1 unmodified, without the right answer"]


def test_of_a_model_that_runs_in_steps_each_result_tells_how_many_rows_its_last_step_had() -> None:
    samples = [a_sample() for _ in range(4)]
    arrivals = [an_arrival(sample, size=size) for sample, size in zip(samples, (16, 16, 3, 1), strict=True)]
    summary = summarise(samples, arrivals, 0, {"step": 4}, "embedded")
    assert summary.batches == {1: 1, 3: 1, 16: 2}
    assert summary.mean_batch_size == 9


def test_a_missing_result_an_error_and_a_duplicate_are_each_trouble() -> None:
    samples = [a_sample(), a_sample(), a_sample()]
    summary = summed(samples, [an_arrival(samples[0]), an_arrival(samples[1], None)], duplicates=1)
    assert summary.troubles == ["1 without a result", "1 with an error", "1 answered twice"]


def test_a_batch_of_n_rows_is_counted_once_though_n_results_name_it() -> None:
    samples = [a_sample() for _ in range(9)]
    sizes = [4, 4, 4, 4, 2, 2, 2, 2, 1]
    summary = summed(samples, [an_arrival(s, size=size) for s, size in zip(samples, sizes, strict=True)])
    assert summary.batches == {1: 1, 2: 2, 4: 1}
    assert summary.mean_batch_size == pytest.approx(9 / 4)


def test_latencies_are_nearest_rank_percentiles_and_throughput_spans_first_send_to_last_result() -> None:
    samples = [a_sample() for _ in range(100)]
    arrivals = [an_arrival(sample, latency_ms=10.0 * (n + 1)) for n, sample in enumerate(samples)]
    summary = summed(samples, arrivals)
    assert summary.alone is None
    assert summary.together is not None
    assert (summary.together.p50_ms, summary.together.p99_ms) == (pytest.approx(500.0), pytest.approx(990.0))
    assert summary.throughput == pytest.approx(100.0)


def test_originals_that_were_sent_alone_have_their_own_latency_and_no_part_in_the_throughput() -> None:
    original, variant = a_sample(original=True), a_sample()
    summary = summed([original, variant], [an_arrival(original, latency_ms=7.0), an_arrival(variant, sent_at=5.0)])
    assert summary.alone is not None
    assert summary.alone.p50_ms == pytest.approx(7.0)
    assert summary.throughput == pytest.approx(100.0)


def test_samples_come_originals_first_and_repeat_as_variants() -> None:
    variant, original = a_sample("variant"), a_sample("original", original=True)
    taken = cycled([variant, original], 5)
    assert [sample.name for sample in taken] == ["original", "variant", "original", "variant", "original"]
    assert [sample.original for sample in taken] == [True, False, False, False, False]
    assert taken[2] == replace(original, original=False)
