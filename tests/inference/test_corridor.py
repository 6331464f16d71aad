"""The corridor, whole, with its model inline: real tensors through a real runner, Kafka a double."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from forebay.errors import ModelError, NoStartError
from forebay.records import Code, Headers, Partition, Record
from forebay.testing import ManualClock, MemoryBroker, make_worker, memory_settings, run_to_end
from forebay.wire import InferenceError, Result
from forebay.worker import Worker
from tests.unit.builders import as_floats, vector_request
from tests.unit.marks import POISON
from tests.unit.test_worker import MODEL, P0, P1, ROOT, codes, memory_broker, outcomes, publish, settings


def run_whole(broker: MemoryBroker, values: Mapping[str, Any] = MODEL) -> Worker:
    """What `run_to_end` does, on a clock that needs no waiting."""
    worker, _, _ = make_worker(broker, memory_settings(values), ROOT, ManualClock(step=0.01))
    logs = broker.topics["requests"].partitions
    worker.run({Partition("requests", number): len(log) for number, log in enumerate(logs) if log})
    return worker


def as_json(datatype: str, shape: str, data: str) -> bytes:
    return f'{{"inputs": [{{"name": "x", "shape": {shape}, "datatype": "{datatype}", "data": {data}}}]}}'.encode()


def total(result: Result | InferenceError) -> list[float]:
    assert isinstance(result, Result), result
    return as_floats(bytes(result["y"]))  # type: ignore[arg-type]


def test_malformed_requests_among_good_ones_cost_the_good_ones_nothing() -> None:
    broker = memory_broker(partitions=3)
    good = {f"good-{n}": [4.0 * n + 6] for n in range(100)}
    bad: dict[str, tuple[bytes | None, Headers, Code]] = {
        "broken": (b'{"inputs": [', [], Code.INVALID_PAYLOAD),
        "empty": (b"", [], Code.INVALID_PAYLOAD),
        "tombstone": (None, [("mine", b"1")], Code.INVALID_PAYLOAD),
        "nan": (as_json("FP32", "[1, 4]", "[NaN, 0, 0, 0]"), [], Code.INVALID_PAYLOAD),
        "dtype": (as_json("INT8", "[1, 4]", "[0, 0, 0, 0]"), [], Code.INVALID_TENSOR),
        "shape": (as_json("FP32", "[1, 3]", "[0, 0, 0]"), [], Code.INVALID_TENSOR),
        "model": (b"{}", [("model", b"nobody")], Code.UNKNOWN_MODEL),
        "reply": (b"{}", [("kafka_replyTopic", b"secret")], Code.REPLY_NOT_ALLOWED),
        "type": (b"<x/>", [("content-type", b"text/xml")], Code.UNSUPPORTED_TYPE),
        "poison": (*vector_request(POISON), Code.MODEL_ERROR),
    }  # fmt: skip
    sent: dict[str, Record] = {}
    for number, name in enumerate(good):
        sent[name] = publish(broker, name, number, partition=number % 3, encoding=("json", "binary")[number % 2])
        if number % 10 == 5:
            name, (value, headers, _) = list(bad.items())[number // 10]
            sent[name] = broker.append("requests", value, name.encode(), headers, partition=number % 3)
    run_whole(broker)
    found = outcomes(broker)
    assert set(found) == {*good, *bad}
    assert {name: total(found[name]) for name in good} == good
    assert {name: code for name, code in codes(broker).items() if code != "ok"} == {
        n: c for n, (_, _, c) in bad.items()
    }
    assert {name: one.source for name, one in found.items()} == {name: one.source for name, one in sent.items()}
    assert broker.committed == {
        Partition("requests", n): len(broker.topics["requests"].partitions[n]) for n in range(3)
    }
    letters = {(one.key or b"").decode(): one for one in broker.records("dead")}
    assert set(letters) == set(bad)
    for name, letter in letters.items():
        assert (letter.key, letter.value) == (sent[name].key, sent[name].value)
        assert letter.headers[: len(sent[name].headers)] == sent[name].headers
        assert dict(letter.headers)["forebay-error-code"] == bad[name][2].encode()


def test_results_carry_what_the_request_asked_to_have_carried() -> None:
    broker = memory_broker()
    echo: Headers = [("kafka_correlationId", b"\0\1"), ("traceparent", b"00-x"), ("ce_id", b"7")]
    publish(broker, "here", headers=echo)
    publish(broker, "there", headers=[*echo, ("kafka_replyTopic", b"replies"), ("kafka_replyPartition", bytes(4))])
    run_whole(broker, {**MODEL, "kafka.reply_topics": "repl.*"})
    for topic, name in (("results", "here"), ("replies", "there")):
        (one,) = broker.records(topic)
        assert one.key == name.encode()
        assert [pair for pair in one.headers if pair in echo] == echo
        assert dict(one.headers)["status"] == b"ok"


def test_a_bounded_run_ends_when_everything_that_was_there_is_committed() -> None:
    broker = memory_broker(partitions=4)
    for number in range(10):
        publish(broker, str(number), partition=number % 2)
    run_whole(broker)
    assert len(outcomes(broker)) == 10
    assert broker.committed == {P0: 5, P1: 5}


def test_a_bounded_run_without_anything_to_do_ends_at_once() -> None:
    broker = memory_broker()
    run_to_end(broker, MODEL, ROOT)
    assert broker.records("results") == []


def test_a_bounded_run_goes_on_where_the_last_one_ended() -> None:
    broker = memory_broker()
    publish(broker, "first")
    run_whole(broker)
    publish(broker, "second")
    run_whole(broker)
    assert set(outcomes(broker)) == {"first", "second"}


def test_a_bounded_run_counts_what_another_member_has_committed() -> None:
    broker = memory_broker(partitions=2)
    publish(broker, "mine")
    publish(broker, "theirs", partition=1)
    broker.committed[P1] = 1
    run_whole(broker)
    assert set(outcomes(broker)) == {"mine"}


@pytest.mark.parametrize("dispatch", ["eager", "linger", "static"])
def test_every_way_to_dispatch_answers_everything_in_the_end(dispatch: str) -> None:
    broker = memory_broker()
    for number in range(37):
        publish(broker, str(number), number)
    values = {**MODEL, "batch.dispatch": dispatch, "batch.max_batch_size": 8}
    worker, _, _ = make_worker(broker, memory_settings(values), ROOT, ManualClock(step=0.001))
    turns = iter(range(200))
    clock = worker._clock
    worker._clock = lambda: (next(turns, None) is None and worker.stop()) or clock()  # type: ignore[func-returns-value]
    worker.run()
    assert {name: total(one) for name, one in outcomes(broker).items()} == {str(n): [4.0 * n + 6] for n in range(37)}


def test_results_leave_in_the_order_of_their_partition_where_that_is_asked_for() -> None:
    broker = memory_broker(partitions=2)
    for number in range(30):
        if number % 7 == 3:
            broker.append("requests", b"{", b"%d" % number, partition=number % 2)
        else:
            publish(broker, str(number), POISON if number % 7 == 5 else number, partition=number % 2)
    run_whole(broker, {**MODEL, "delivery.ordering": "partition", "batch.max_batch_size": 4})
    order = [int(one.key or b"") for one in broker.records("results")]
    assert [number for number in order if number % 2 == 0] == list(range(0, 30, 2))
    assert [number for number in order if number % 2 == 1] == list(range(1, 30, 2))


def test_a_worker_serves_several_models_each_with_its_own_requests() -> None:
    broker = memory_broker()
    publish(broker, "first")
    publish(broker, "second", headers=[("model", b"b")])
    models = [{"name": name, "factory": "tests.inference.models:Sums"} for name in ("a", "b")]
    run_whole(broker, {"models": models})
    assert {name: one.model for name, one in outcomes(broker).items() if isinstance(one, Result)} == {
        "first": "a",
        "second": "b",
    }


def test_a_model_that_cannot_load_stops_the_start_and_nothing_is_read() -> None:
    broker = memory_broker()
    publish(broker, "a")
    worker, consumer, _ = make_worker(broker, settings(model__factory="tests.inference.models:Nothing"), ROOT)
    with pytest.raises(ModelError, match="Nothing"):
        worker.run()
    assert (broker.committed, broker.records("results")) == ({}, [])
    assert consumer.closed


def test_a_partition_without_a_start_ends_the_worker_when_what_it_had_is_answered_and_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it had was deleted, perhaps, and nobody could read it again."""
    broker = memory_broker(partitions=2)
    values = {**MODEL, "batch.dispatch": "static", "batch.max_batch_size": 8}
    worker, consumer, _ = make_worker(broker, memory_settings(values), ROOT, ManualClock(step=0.01))
    for number in range(5):
        publish(broker, str(number))
    receive, waiting = consumer.receive, [True]

    def stops(limit: int, wait: float) -> list[Record]:
        if worker._custody.requests and waiting:
            waiting.clear()
            raise NoStartError("requests [1]: up to 7 requests deleted")
        return receive(limit, wait)

    monkeypatch.setattr(consumer, "receive", stops)
    with pytest.raises(NoStartError):
        worker.run()
    assert outcomes(broker).keys() == set("01234")
    assert broker.committed == {P0: 5}
    assert consumer.closed


def test_metrics_count_every_outcome_by_its_code() -> None:
    broker = memory_broker()
    publish(broker, "a")
    publish(broker, "b", POISON)
    broker.append("requests", b"{", b"c")
    worker = run_whole(broker)
    value = worker._observer._metrics.registry.get_sample_value
    for outcome in ("ok", "model_error", "invalid_payload"):
        assert value("forebay_requests_total", {"model": "model", "outcome": outcome}) == 1
    assert value("forebay_request_duration_seconds_count", {"model": "model"}) == 3
    cuts = sum(
        sample.value
        for family in worker._observer._metrics.registry.collect()
        for sample in family.samples
        if sample.name == "forebay_batch_cuts_total"
    )
    assert cuts == value("forebay_executions_total", {"model": "model"})


def test_an_unknown_model_gets_no_metrics_of_its_own() -> None:
    broker = memory_broker()
    for number in range(5):
        publish(broker, str(number), headers=[("model", b"made-up-%d" % number)])
    worker = run_whole(broker)
    value = worker._observer._metrics.registry.get_sample_value
    assert value("forebay_requests_total", {"model": "unknown", "outcome": "unknown_model"}) == 5
    assert json.loads(broker.records("results")[0].value or b"")["code"] == "unknown_model"
