"""`forebay plan`: traffic, curves, estimates, advice, and what it says about bad input."""

from __future__ import annotations

import builtins
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from rich.console import Console
from typer.testing import CliRunner

from forebay.cli import plan_curve
from forebay.cli.app import app
from forebay.cli.plan_curve import Measured, from_reading, read, save
from forebay.cli.plan_topic import Seen, as_traffic, newest, of_model, shapes_of, verify
from forebay.cli.plan_traffic import Traffic, from_rate
from forebay.cli.plan_view import table
from forebay.cli.planning import Advice, Candidate, Estimate, Planner, advise, candidates, shares
from forebay.cli.scrape import Reading, parse
from forebay.cli.top import UnreachableError
from forebay.errors import ConfigError, ForebayError, UsageError
from forebay.metrics import Metrics
from forebay.settings import Batch

POINTS = [(0, rows, 0.002 + 0.000_1 * rows, 0.002 + 0.000_1 * rows) for rows in (1, 2, 4, 8, 16, 32)]
CURVE = Measured("m", "cpu", POINTS)


@pytest.fixture
def curve_file(tmp_path: Path) -> Path:
    save(CURVE, tmp_path / "curve.json")
    return tmp_path / "curve.json"


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, int]]:
    """Run the command in this process; returns its standard output and its exit code."""
    for name in ("FOREBAY_CONFIG", "FOREBAY_KAFKA__BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> tuple[str, int]:
        result = CliRunner().invoke(app, ["plan", *arguments], standalone_mode=False)
        if isinstance(result.exception, ForebayError):
            raise result.exception
        assert result.exception is None, result.exception
        return result.stdout, result.return_value

    return run


def seen(*times_ms: int, shapes: tuple[tuple[int, ...], ...] = ((1, 4),), partition: int = 0) -> list[Seen]:
    return [Seen(time, partition, shapes) for time in times_ms]


def estimate(candidate: Candidate | None = None, **values: Any) -> Estimate:
    """A candidate that keeps up with 100 requests a second, unless said otherwise."""
    usual: dict[str, Any] = {"p50": 0.003, "p99": 0.005, "mean": 0.003, "mean_batch": 2.0, "busy": 0.5, "rate": 100.0}
    rest: dict[str, Any] = {"peak": 120.0, "capacity": 400.0, "expired": 0, "unanswered": 0, "padding": 1.0}
    return Estimate(candidate or Candidate(Batch()), **usual | rest | values)


def tried(replicas: int = 1, **batch: Any) -> Candidate:
    return Candidate(Batch(**batch), replicas)


def test_a_curve_comes_back_from_its_file_as_it_went(tmp_path: Path) -> None:
    curve = Measured("m", "cuda:0", [(0, 1, 0.002, 0.003), (24, 8, 0.004, 0.005)], ((0, 1),))
    save(curve, tmp_path / "c.json")
    again = read(tmp_path / "c.json")
    assert (again.model, again.device, again.axes) == ("m", "cuda:0", ((0, 1),))
    assert list(again.points) == curve.points


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is no JSON"),
        ("[]", "forebay-curve-1"),
        ('{"format": "forebay-curve-0", "points": []}', "forebay-curve-1"),
        ('{"format": "forebay-curve-1"}', "points"),
        ('{"format": "forebay-curve-1", "points": []}', "holds no point"),
        ('{"format": "forebay-curve-1", "points": [{"rows": 1}]}', "lacks 'p50_ms'"),
        ('{"format": "forebay-curve-1", "points": [{"rows": 0, "p50_ms": 1}]}', "at least one row"),
        ('{"format": "forebay-curve-1", "points": [{"rows": 1, "p50_ms": 0}]}', "more than no time"),
        ('{"format": "forebay-curve-1", "points": [{"rows": "x", "p50_ms": 1}]}', "a point"),
        ('{"format": "forebay-curve-1", "points": [7]}', "a point"),
        ('{"format": "forebay-curve-1", "points": 7}', "a point"),
    ],
)
def test_a_broken_curve_file_gets_one_sentence_that_names_it(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=told) as caught:
        read(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_curve_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.json: No such file"):
        read(tmp_path / "absent.json")


def reading(metrics: Metrics) -> Reading:
    return Reading("w:8080", 0.0, parse(generate_latest(metrics.registry).decode()))


def test_the_curve_of_a_running_worker_is_what_its_metrics_say() -> None:
    metrics = Metrics()
    for rows, middle, high in ((1, 0.002, 0.003), (8, 0.004, 0.001)):
        metrics.service_time.labels("a", "24", str(rows), "0.5").set(middle)
        metrics.service_time.labels("a", "24", str(rows), "0.95").set(high)
    curve = from_reading(reading(metrics), None)
    assert curve.model == "a"
    assert curve.points == [(24, 1, 0.002, 0.003), (24, 8, 0.004, 0.004)]
    assert curve.ragged is None, "it pads, and nothing tells which dimensions"


def test_a_worker_that_has_not_run_anything_or_serves_others_is_told() -> None:
    metrics = Metrics()
    with pytest.raises(UsageError, match="no service times yet"):
        from_reading(reading(metrics), None)
    for model in ("a", "b"):
        metrics.service_time.labels(model, "0", "1", "0.5").set(0.002)
    with pytest.raises(UsageError, match="serves a, b; choose one with --model"):
        from_reading(reading(metrics), None)
    with pytest.raises(UsageError, match="serves a, b, not c"):
        from_reading(reading(metrics), "c")
    assert from_reading(reading(metrics), "b").model == "b"


def test_executions_scatter_as_wide_as_they_were_measured() -> None:
    service = Measured("m", "cpu", [(0, 1, 0.010, 0.015), (0, 8, 0.020, 0.030)]).service()
    times = sorted(service(0, 1) for _ in range(4_000))
    assert times[2_000] == pytest.approx(0.010, rel=0.05)
    assert times[3_800] == pytest.approx(0.015, rel=0.05)
    steady = CURVE.service()
    assert {steady(0, 8) for _ in range(10)} == {0.0028}


def test_a_ragged_request_of_unknown_length_takes_as_long_as_the_longest() -> None:
    service = Measured("m", "cpu", [(16, 1, 0.002, 0.002), (128, 1, 0.009, 0.009)], ((0, 1),)).service()
    assert service(0, 1) == 0.009
    assert service(16, 1) == 0.002


def test_shapes_are_found_in_json_and_in_the_head_of_binary_requests() -> None:
    body = {"inputs": [{"name": "x", "data": [1, 2], "shape": [2, 1]}, {"name": "y", "shape": [2, 7]}]}
    assert shapes_of(json.dumps(body).encode()) == ((2, 1), (2, 7))
    assert shapes_of(b'{"inputs":[{"shape" : [ 3 ,\n 4 ]}]}') == ((3, 4),)


@pytest.mark.parametrize(
    "value",
    [b"", b"\xff\x00", b'{"shape":[]}', b'{"shape":[0,4]}', b'{"shape":["1"]}', b'{"shape":[1,4]},{"shape":[2,4]}'],
)
def test_what_makes_no_sense_as_a_shape_is_none(value: bytes) -> None:
    assert shapes_of(value) == ()


def test_traffic_keeps_the_gaps_the_rows_and_the_deadlines() -> None:
    records = [
        Seen(1_000, 0, ((1, 4),)),
        Seen(1_250, 1, ((3, 4),), priority=1, timeout_ms=50),
        Seen(2_000, 0, ((1, 4),)),
    ]
    traffic = as_traffic(records, "t", ())
    assert [arrival.at for arrival in traffic.arrivals] == [0.0, 0.25, 1.0]
    assert [arrival.rows for arrival in traffic.arrivals] == [1, 3, 1]
    assert traffic.arrivals[1].deadline == pytest.approx(0.30)
    assert (traffic.rate, traffic.notes) == (2.0, [])
    twice = as_traffic(records, "t", (), speed=2.0)
    assert [arrival.at for arrival in twice.arrivals] == [0.0, 0.125, 0.5]
    assert twice.arrivals[1].deadline == pytest.approx(0.175), "a deadline stays as far away as it was"


def test_requests_of_different_shapes_share_a_batch_only_where_the_model_pads() -> None:
    records = [Seen(number, 0, ((1, 4 + number % 2),)) for number in range(10)]
    apart = as_traffic(records, "t", ())
    assert len({arrival.kind for arrival in apart.arrivals}) == 2
    assert apart.notes == ["2 shapes that cannot share a batch"]
    together = as_traffic(records, "t", ((0, 1),))
    assert {arrival.kind for arrival in together.arrivals} == {0}
    assert together.axes == as_traffic(records, "t", None).axes == ((0, 1),)


def test_ragged_dimensions_that_the_records_do_not_have_are_left_out() -> None:
    flat = [Seen(number, 0, ((1,),)) for number in range(3)]
    assert as_traffic(flat, "t", ((0, 1),)).axes == ()
    mixed = [Seen(0, 0, ((1, 4),)), Seen(1, 0, ((1, 4), (1, 2)))]
    assert as_traffic(mixed, "t", None).axes == ()


def test_a_trace_starts_where_every_partition_was_read() -> None:
    hot = seen(*range(500, 600, 10), partition=0)
    quiet = seen(0, 400, 590, partition=1)
    found = sorted(hot + quiet, key=lambda one: one.at_ms)
    kept = newest(found, last=100, share=10)
    assert kept[0].at_ms == 500
    assert len(kept) == 11
    assert len(newest(found, last=100, share=50)) == 13, "nothing was cut off"
    assert len(newest(found, last=4, share=50)) == 4


@pytest.mark.parametrize(
    ("records", "told"),
    [
        (seen(5), "holds one record"),
        (seen(5, 5, 5), "carry the same time"),
        (seen(-1, 5), "carry no time"),
        (seen(10**15, 10**15), "carry the same time"),
    ],
)
def test_records_that_tell_no_times_are_refused_with_the_mend(records: list[Seen], told: str) -> None:
    with pytest.raises(ConfigError, match=f"{told}.*--rate"):
        verify(records, "t")


def test_of_several_models_the_requests_of_one_are_replayed() -> None:
    records = [Seen(number, 0, ((1, 4),), model=model) for number, model in enumerate(["a", None, "b", "b", None])]
    assert [one.at_ms for one in of_model(records, "t", "a", "a")] == [0, 1, 4]
    assert [one.at_ms for one in of_model(records, "t", "b", "a")] == [2, 3]
    with pytest.raises(ConfigError, match="no record for model c"):
        of_model(records, "t", "c", "a")


def test_the_busiest_second_and_the_sparkline_show_a_burst() -> None:
    times = [*range(0, 10_000, 100), *range(5_000, 5_100)]
    traffic = as_traffic(seen(*sorted(times)), "t", ())
    assert traffic.peak() == 110
    drawn = traffic.sparkline(10)
    assert len(drawn) == 10
    assert drawn.index("█") == 5


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="--rate takes"):
        from_rate(rate, 100, 1, 1)


def test_a_replay_goes_through_the_batcher() -> None:
    planner = Planner(CURVE, overhead=0.0)
    traffic = from_rate(1_000, 6_000, 1, 1)
    eager = planner.estimate(tried(), traffic)
    assert eager.p50 * 1000 == pytest.approx(4.0, abs=0.6)
    assert eager.rate == pytest.approx(1_000, rel=0.05)
    assert eager.capacity == pytest.approx(32 / 0.0052, rel=0.02)
    assert eager.load == pytest.approx(1_000 * 0.0052 / 32, rel=0.05)
    linger = planner.estimate(tried(dispatch="linger", max_wait_ms=5), traffic)
    assert linger.busy < 0.6 < 0.9 < eager.busy


def test_more_than_it_can_answer_falls_behind_and_replicas_or_gpus_mend_it() -> None:
    planner = Planner(CURVE, overhead=0.0)
    traffic = from_rate(9_000, 9_000, 1, 1)
    assert not planner.estimate(tried(), traffic).keeps_up
    replicas = planner.estimate(tried(replicas=2), traffic)
    gpus = planner.estimate(Candidate(Batch(), gpus=2), traffic)
    assert replicas.keeps_up
    assert gpus.keeps_up
    assert gpus.capacity == pytest.approx(replicas.capacity, rel=0.02)


def test_a_candidate_that_is_too_slow_for_the_busiest_second_alone_lags_at_peaks() -> None:
    times = [*range(0, 20_000, 100), *range(10_000, 11_000, 1)]
    traffic = as_traffic(seen(*sorted(times)), "t", ())
    small, large = (Planner(CURVE, overhead=0.0).estimate(tried(max_batch_size=size), traffic) for size in (1, 8))
    assert small.keeps_up
    assert small.lags_at_peaks
    assert not large.lags_at_peaks
    assert "lags at peaks" in drawn([small, large], Advice(large, "because"))


def test_static_waits_for_full_batches() -> None:
    static = Planner(CURVE, overhead=0.0).estimate(tried(dispatch="static"), from_rate(400, 3_200, 1, 1))
    assert static.mean_batch == 32
    assert static.p50 > 0.03


def test_the_default_timeout_of_the_settings_is_a_deadline() -> None:
    planner = Planner(CURVE, overhead=0.0)
    traffic = from_rate(9_000, 3_000, 1, 1)
    assert planner.estimate(tried(default_timeout_ms=20), traffic).expired > 0
    assert planner.estimate(tried(), traffic).expired == 0


def test_gpus_share_the_partitions_of_a_topic() -> None:
    records = [one for partition in range(4) for one in seen(*range(0, 100, 10), partition=partition)]
    arrivals = as_traffic(sorted(records, key=lambda one: one.at_ms), "t", ()).arrivals
    assert [{arrival.partition for arrival in share} for share in shares(arrivals, 2)] == [{0, 2}, {1, 3}]
    assert len(shares(arrivals, 8)) == 4, "workers without a partition get nothing"
    by_chance = shares(from_rate(100, 1_000, 1, 1).arrivals, 2)
    assert all(400 < len(share) < 600 for share in by_chance)


def test_the_candidates_are_the_product_and_a_wait_matters_to_linger_alone() -> None:
    found = candidates(Batch(), [8, 32], ["eager", "linger"], [2.0, 5.0], [1, 2], [1])
    assert len(found) == 2 * (1 + 2) * 2
    assert len({str(one) for one in found}) == len(found)


def test_sizes_that_a_smaller_batch_does_not_hold_are_left_out_of_its_allowed_ones() -> None:
    [small, large] = candidates(Batch(allowed_batch_sizes=(4, 16, 32)), [8, 32], ["eager"], [5.0], [1], [1])
    assert small.batch.allowed_batch_sizes == (4,)
    assert large.batch.allowed_batch_sizes == (4, 16, 32)


def test_the_least_p99_is_advised_and_among_alike_the_less_busy_one() -> None:
    slow = estimate(tried(max_batch_size=8), p99=0.009)
    quick = estimate(tried(max_batch_size=32), p99=0.005, busy=0.95)
    calm = estimate(tried(max_batch_size=64), p99=0.00505, busy=0.40)
    assert advise([slow, quick]).estimate is quick
    assert advise([slow, quick, calm]).estimate is calm


def test_the_fewest_replicas_that_keep_up_are_advised() -> None:
    behind = estimate(tried(max_batch_size=8), capacity=90.0, p99=3.0)
    two = estimate(tried(replicas=2), p99=0.005)
    three = estimate(tried(replicas=3), p99=0.001)
    advice = advise([behind, two, three])
    assert advice.estimate is two
    assert "with fewer replicas none does" in advice.reason


def test_a_target_is_met_at_the_least_busy_share() -> None:
    quick = estimate(tried(max_batch_size=8), p99=0.004, busy=0.9)
    cheap = estimate(tried(dispatch="linger"), p99=0.009, busy=0.3)
    slow = estimate(tried(dispatch="linger", max_wait_ms=20), p99=0.024, busy=0.1)
    assert advise([quick, cheap, slow], target=0.010).estimate is cheap
    assert advise([quick, cheap, slow], target=0.005).estimate is quick
    none = advise([quick, cheap, slow], target=0.001)
    assert none.estimate is None
    assert "the least is 4.0 ms" in none.reason


def test_where_nothing_keeps_up_it_says_how_much_is_missing() -> None:
    advice = advise([estimate(rate=1_000.0, capacity=400.0)])
    assert advice.estimate is None
    assert "1,000 requests/s come" in advice.reason
    assert "try 4 replicas or GPUs" in advice.reason
    expiring = advise([estimate(expired=12)])
    assert expiring.estimate is None
    assert "at least 12" in expiring.reason


def drawn(estimates: list[Estimate], advice: Advice) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(table(estimates, advice))
    return out.getvalue()


def test_a_table_with_everything_in_it_fits_a_terminal_of_80_columns() -> None:
    best = estimate(tried(dispatch="linger", max_wait_ms=12.5), p99=123.4, busy=0.437)
    rows = [
        best,
        estimate(Candidate(Batch(max_batch_size=1024, dispatch="static"), 2, 4), p50=0.0101, p99=0.999, busy=1.0),
        estimate(tried(max_batch_size=8), capacity=50.0, p99=7.7777),
        estimate(tried(max_batch_size=8, dispatch="static"), unanswered=40),
    ]
    text = drawn(rows, Advice(best, "because"))
    assert "…" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    marked = [line for line in text.splitlines() if line.startswith("▶")]
    assert len(marked) == 1
    assert "linger 12.5 ms" in marked[0]
    behind = next(line for line in text.splitlines() if "falls behind" in line)
    assert "7,778" not in behind, "a latency that grows for ever is no number"


def test_the_command_prints_a_table_and_what_to_set(plan: Callable[..., tuple[str, int]], curve_file: Path) -> None:
    text, code = plan("--rate", "800", "--requests", "2000", "--curve", str(curve_file), "--burst", "16")
    assert code == 0
    assert "bursts of 16" in text
    assert "what to set" in text
    assert "batch: {max_batch_size: " in text
    assert "dispatch: eager}" in text


def test_the_command_prints_json_for_programs(plan: Callable[..., tuple[str, int]], curve_file: Path) -> None:
    text, code = plan("--rate", "800", "--requests", "1000", "--curve", str(curve_file), "--json", "--replicas", "1,2")
    found = json.loads(text)
    assert code == 0
    assert len(found["candidates"]) == 2 * 2 * 2, "8 and 32 rows: 128 is far beyond the curve"
    assert {one["replicas"] for one in found["candidates"]} == {1, 2}
    assert found["recommended"]["inference"] == {"replicas": 1}
    assert all(sum(one["cuts"].values()) > 0 for one in found["candidates"])
    assert found["curve"]["format"] == plan_curve.FORMAT


def test_traffic_that_nothing_keeps_up_with_exits_with_1(
    plan: Callable[..., tuple[str, int]], curve_file: Path
) -> None:
    text, code = plan("--rate", "30000", "--requests", "3000", "--curve", str(curve_file))
    assert code == 1
    assert "falls behind" in text
    assert "none keeps up" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--rate", "0"), "--rate takes"),
        (("--rate", "5", "--from-topic", "t"), "either --rate or --from-topic"),
        (("--rate", "5", "--url", "127.0.0.1:1"), "either --curve or --url"),
        (("--rate", "5", "--max-batch-size", "8,x"), "--max-batch-size takes numbers"),
        (("--rate", "5", "--max-batch-size", "0"), "--max-batch-size takes numbers"),
        (("--rate", "5", "--max-wait-ms", "-1"), "--max-wait-ms takes numbers"),
        (("--rate", "5", "--gpus", ""), "--gpus takes numbers"),
        (("--rate", "5", "--dispatch", "eager,lingr"), "--dispatch takes eager, linger, static, defer.*'lingr'"),
        (("--rate", "5", "--dispatch", "defer"), "default_timeout_ms"),
        (("--speed", "0"), "--speed takes"),
        (("--speed", "1e-300"), "--speed takes"),
        (("--rate", "1e-300"), "--rate takes"),
        (("--rate", "1e308"), "--rate takes"),
        (("--rate", "5", "--burst", "1000000"), "--burst takes up to 100,000"),
        (("--rate", "5", "--overhead-ms", "inf"), "--overhead-ms takes"),
        (("--minutes", "nan"), "--minutes takes"),
        (("--rate", "5", "--target-latency-ms", "-3"), "--target-latency-ms takes"),
        (("--rate", "5", "--plot", "no-such-folder/p.png"), "no folder no-such-folder"),
        (("--rate", "5", "--plot", "p.gif"), r"\.png, \.svg or \.pdf"),
    ],
)
def test_a_wrong_option_gets_one_sentence(
    plan: Callable[..., tuple[str, int]], curve_file: Path, arguments: tuple[str, ...], told: str
) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        plan("--curve", str(curve_file), *arguments)
    assert "\n" not in str(caught.value)


def test_without_a_model_it_says_where_service_times_can_come_from(plan: Callable[..., tuple[str, int]]) -> None:
    with pytest.raises(UsageError, match="--curve FILE or the --url"):
        plan("--rate", "5")
    with pytest.raises(UsageError, match="no model other is configured, only m"):
        plan("--rate", "5", "--model", "other", "-s", "model.factory=a:B", "-s", "model.name=m")


def test_a_worker_that_does_not_answer_is_named(plan: Callable[..., tuple[str, int]]) -> None:
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1"):
        plan("--rate", "5", "--url", "127.0.0.1:1")


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(
    plan: Callable[..., tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=r"pip install 'forebay\[plot\]'"):
        plan("--rate", "5", "--plot", str(tmp_path / "p.png"), "--curve", "absent.json")


def test_a_curve_is_saved_and_read_again(
    plan: Callable[..., tuple[str, int]], curve_file: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    plan("--rate", "800", "--requests", "200", "--curve", str(curve_file), "--save-curve", str(saved), "--json")
    assert saved.read_bytes() == curve_file.read_bytes()
    with pytest.raises(UsageError, match="--save-curve"):
        plan("--rate", "8", "--curve", str(curve_file), "--save-curve", str(tmp_path / "absent" / "c.json"))


def test_a_traffic_knows_its_rate() -> None:
    traffic = Traffic(from_rate(500, 4_000, 1, 3).arrivals, "here")
    faster = traffic.at_rate(50.0, 1_000)
    assert len(faster) == 1_000
    assert 999 / (faster[-1].at - faster[0].at) == pytest.approx(50, rel=0.1)
