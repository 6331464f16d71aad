"""The outbox: an outcome is acknowledged once, whole, however often its topic refuses it."""

from __future__ import annotations

import json
from typing import Any

import confluent_kafka as ck
import numpy as np
import pytest

from forebay.errors import ConfigError, KafkaFatalError
from forebay.records import Code, Failure, Outcome, Output, Reply
from forebay.stream.memory import MemoryBroker, MemoryProducer
from forebay.stream.outbox import Outbox
from forebay.stream.results import Encoder
from tests.unit.builders import request, signature

ENCODER = Encoder([signature()], "results", "group")
E = ck.KafkaError


class Producer(MemoryProducer):
    """Raises what produce() raises on the calling thread: a full queue, or a refusal."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.raises: list[Exception] = []
        self.calls = 0

    def produce(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.raises:
            raise self.raises.pop(0)
        super().produce(*args, **kwargs)


class Scene:
    """An outbox on an in-memory broker, and its time."""

    def __init__(self, **limits: int) -> None:
        self.broker = MemoryBroker({"results": 2, "replies": 1, "dead": 1})
        self.producer = Producer(self.broker)
        self.config: dict[str, Any] = {}
        self.outbox = Outbox({}, ENCODER, "dead", make_client=self._client)
        self.outbox.limits = dict(limits)
        self.outbox.start()
        self.now = 0.0
        self.served: list[Outcome] = []

    def _client(self, config: dict[str, Any], **_: Any) -> Producer:
        self.config = config
        return self.producer

    def send(self, *outcomes: Outcome) -> None:
        for outcome in outcomes:
            self.outbox.send(outcome, self.now)

    def serve(self, seconds: float = 0.0) -> list[Outcome]:
        self.now += seconds
        found = self.outbox.serve(self.now)
        self.served += found
        return found

    def serve_until_closed(self) -> list[Outcome]:
        """Turn by turn; the outbox must come to an end within a simulated hour."""
        while self.outbox.unacknowledged and self.now < 3_600:
            self.serve(0.5)
        assert not self.outbox.unacknowledged, self.outbox.trouble
        return self.served

    def values(self, topic: str) -> list[Any]:
        return [json.loads(one.value or b"null") for one in self.broker.records(topic)]


def result(name: str = "a", *, reply: Reply | None = None, size: int = 1) -> Outcome:
    asked = request(name)
    asked.reply = reply
    content = np.zeros(2 * size, "<f4").tobytes()
    encoder = ENCODER if size == 1 else Encoder([signature(outputs=[_wide(size)])], "results", "group")
    (made,) = encoder.results([asked], [Output((2 * size,), content)], 1)
    return made


def _wide(size: int) -> Any:
    from forebay.records import TensorShape

    return TensorShape("y", "FP32", (-1, 2 * size))


def error(name: str = "a", code: Code = Code.MODEL_ERROR) -> Outcome:
    return ENCODER.error(request(name), Failure(code, "why"))


# ---------------------------------------------------------------------- the plain way


def test_an_outcome_is_closed_when_its_acknowledgement_came_and_not_before() -> None:
    scene, one = Scene(), result()
    scene.producer.hold_reports = True
    scene.send(one)
    assert scene.serve() == []
    assert scene.outbox.unacknowledged == 1
    scene.producer.hold_reports = False
    assert scene.serve() == [one]
    assert scene.serve() == []
    assert (scene.outbox.unacknowledged, one.pending) == (0, 0)
    (sent,) = scene.broker.records("results")
    assert (sent.key, sent.value, sent.headers) == (b"a", one.value, one.headers)


def test_an_error_is_closed_only_when_its_dead_letter_is_acknowledged_too() -> None:
    scene, one = Scene(), error()
    scene.broker.fail_next("dead", E.REQUEST_TIMED_OUT)
    scene.send(one)
    assert scene.serve() == []
    assert len(scene.broker.records("results")) == 1
    assert scene.serve(1.0) == []  # sent again
    assert scene.serve() == [one]
    (letter,) = scene.broker.records("dead")
    assert (letter.key, letter.value) == (one.record.key, one.record.value)
    assert scene.outbox.dead_letters == [Code.MODEL_ERROR]


def test_a_passed_deadline_has_no_dead_letter() -> None:
    scene = Scene()
    scene.send(error(code=Code.DEADLINE_EXCEEDED))
    assert len(scene.serve()) == 1
    assert scene.broker.records("dead") == []


def test_a_reply_goes_to_the_partition_that_was_asked_for() -> None:
    scene = Scene()
    scene.send(result(reply=Reply("results", 1)))
    assert len(scene.serve()) == 1
    assert [one.partition for one in scene.broker.records("results")] == [1]


# ---------------------------------------------------------------------- trouble and its end


@pytest.mark.parametrize(
    "code",
    [E.REQUEST_TIMED_OUT, E.UNKNOWN_TOPIC_OR_PART, E.TOPIC_AUTHORIZATION_FAILED, E.NOT_ENOUGH_REPLICAS,
     E._ALL_BROKERS_DOWN],
)  # fmt: skip
def test_what_fails_for_want_of_a_broker_or_a_right_is_sent_again_until_it_is_taken(code: int) -> None:
    scene, one = Scene(), result()
    scene.broker.fail_next("results", code, times=7)
    scene.send(one)
    assert scene.serve_until_closed() == [one]
    assert len(scene.broker.records("results")) == 1


def test_the_pauses_between_tries_grow_up_to_ten_seconds() -> None:
    scene = Scene()
    scene.broker.fail_next("results", E.REQUEST_TIMED_OUT, times=30)
    scene.send(result())
    tries = [0.0]
    calls = scene.producer.calls
    while scene.outbox.unacknowledged:
        scene.serve(0.01)
        if scene.producer.calls > calls:
            calls = scene.producer.calls
            tries.append(scene.now)
    pauses = np.diff(tries)
    assert pauses[0] < 0.2
    assert (np.diff(pauses) > -0.05).all()
    assert 9.5 < pauses[-1] < 10.5


def test_trouble_is_named_while_it_lasts_and_gone_when_it_is_over() -> None:
    scene = Scene()
    scene.broker.fail_next("results", E.NOT_ENOUGH_REPLICAS)
    scene.send(result())
    scene.serve()
    assert scene.outbox.trouble is not None
    assert "results" in scene.outbox.trouble
    scene.serve(1.0)
    scene.serve()
    assert scene.outbox.trouble is None


def test_after_a_success_the_next_trouble_begins_with_a_short_pause() -> None:
    scene = Scene()
    scene.broker.fail_next("results", E.REQUEST_TIMED_OUT, times=12)
    scene.send(result())
    scene.serve_until_closed()
    scene.broker.fail_next("results", E.REQUEST_TIMED_OUT)
    scene.send(result("b"))
    scene.serve()
    scene.serve(0.2)
    assert len(scene.serve()) == 1


def test_a_full_queue_of_the_producer_is_waited_out_and_is_no_trouble() -> None:
    scene = Scene()
    scene.producer.raises = [BufferError(), BufferError(), BufferError()]
    one = error()
    scene.send(one)
    scene.serve()
    assert scene.outbox.trouble is None
    assert scene.serve_until_closed() == [one]
    assert (len(scene.broker.records("results")), len(scene.broker.records("dead"))) == (1, 1)


def test_one_outcome_in_trouble_holds_up_no_other() -> None:
    scene, stuck, free = Scene(), result("stuck", reply=Reply("replies", None)), result("free")
    scene.broker.fail_next("replies", E.REQUEST_TIMED_OUT, times=100)
    scene.send(stuck, free)
    assert scene.serve() == [free]
    assert scene.outbox.unacknowledged == 1


# ---------------------------------------------------------------------- too large


def too_large_for(scene: Scene, *topics: str) -> None:
    for topic in topics:
        scene.broker.topics[topic].max_message_bytes = 1_000


def test_a_result_that_its_topic_does_not_take_becomes_an_error_with_a_dead_letter() -> None:
    scene, one = Scene(), result(size=1_000)
    too_large_for(scene, "results")
    scene.send(one)
    assert scene.serve_until_closed() == [one]
    (value,) = scene.values("results")
    assert value["code"] == Code.RESULT_TOO_LARGE
    assert "results" in value["error"]
    (letter,) = scene.broker.records("dead")
    assert letter.value == one.record.value
    assert one.failure is not None
    assert one.failure.code is Code.RESULT_TOO_LARGE
    assert scene.outbox.dead_letters == [Code.RESULT_TOO_LARGE]


def test_a_result_above_a_known_limit_is_replaced_before_it_is_sent() -> None:
    scene, one = Scene(results=5_000), result(size=1_000)
    scene.send(one)
    scene.serve()
    assert one.failure is not None
    assert scene.values("results")[0]["code"] == Code.RESULT_TOO_LARGE
    assert scene.producer.calls == 2  # the error and its dead letter


def test_a_refusal_raised_on_the_spot_is_treated_like_one_reported_later() -> None:
    scene, one = Scene(), result(size=1_000)
    scene.producer.raises = [ck.KafkaException(E(E.MSG_SIZE_TOO_LARGE)) for _ in range(3)]
    scene.send(one)
    assert scene.serve_until_closed() == [one]
    assert scene.values("results")[0]["code"] == Code.RESULT_TOO_LARGE


def test_a_result_that_was_refused_with_the_batch_around_it_is_tried_alone_first() -> None:
    scene, one = Scene(), result()
    scene.broker.fail_next("results", E.MSG_SIZE_TOO_LARGE)
    scene.send(one)
    scene.serve_until_closed()
    assert one.failure is None
    assert len(scene.broker.records("results")) == 1


def test_a_dead_letter_that_its_topic_does_not_take_leaves_the_value_out() -> None:
    scene, one = Scene(), error()
    one.record.value = b"x" * 5_000
    one.record.headers = [("mine", b"m")]
    too_large_for(scene, "dead")
    scene.send(one)
    assert scene.serve_until_closed() == [one]
    (letter,) = scene.broker.records("dead")
    assert letter.value is None
    assert letter.key == one.record.key
    names = [name for name, _ in letter.headers]
    assert "forebay-value-left-out" in names
    assert "kafka_dlt-original-offset" in names
    assert "forebay-error-code" in names


# ---------------------------------------------------------------------- replies that cannot be


@pytest.mark.parametrize("code", [E._UNKNOWN_PARTITION, E._INVALID_ARG])
def test_a_reply_partition_that_does_not_exist_gives_any_partition_of_the_topic(code: int) -> None:
    scene, one = Scene(), result(reply=Reply("replies", 0))
    scene.broker.fail_next("replies", code)
    scene.send(one)
    assert scene.serve_until_closed() == [one]
    assert len(scene.broker.records("replies")) == 1


def test_a_reply_partition_beyond_the_last_gives_another() -> None:
    scene, one = Scene(), result(reply=Reply("replies", 99))
    scene.send(one)
    assert scene.serve_until_closed() == [one]


@pytest.mark.parametrize("code", [E.UNKNOWN_TOPIC_OR_PART, E.TOPIC_EXCEPTION, E.TOPIC_AUTHORIZATION_FAILED])
def test_a_reply_topic_that_takes_nothing_holds_up_nobody(code: int) -> None:
    """Whoever may send a request could stop its partition with a topic that is allowed and does not exist."""
    scene, one = Scene(), result(reply=Reply("replies", 0))
    scene.broker.fail_next("replies", code, times=1_000)
    scene.send(one)
    assert scene.serve_until_closed() == [one]
    (value,) = scene.values("results")
    assert value["code"] == Code.REPLY_NOT_ALLOWED
    assert "replies" in value["error"]
    assert [letter.value for letter in scene.broker.records("dead")] == [one.record.value]


def test_an_error_whose_reply_topic_takes_nothing_still_reaches_the_output_topic_once() -> None:
    asked = request("a")
    asked.reply = Reply("nowhere", None)
    scene, one = Scene(), ENCODER.error(asked, Failure(Code.MODEL_ERROR, "why"))
    scene.send(one)
    assert scene.serve_until_closed() == [one]
    assert len(scene.values("results")) == 1


# ---------------------------------------------------------------------- the end


def test_a_fatal_error_stops_the_outbox() -> None:
    for by_report in (True, False):
        scene = Scene()
        if by_report:
            scene.broker.fail_next("results", E._FATAL)
        else:
            scene.config["error_cb"](E(E._FATAL, "fenced", True))
        scene.send(result())
        with pytest.raises(KafkaFatalError, match="cannot go on"):
            scene.serve()


def test_an_error_that_is_not_fatal_stops_nothing() -> None:
    scene = Scene()
    scene.config["error_cb"](E(E._ALL_BROKERS_DOWN))
    scene.send(result())
    assert len(scene.serve()) == 1


def test_closing_gives_up_what_is_not_acknowledged() -> None:
    scene, one = Scene(), result()
    scene.producer.hold_reports = True
    scene.send(one)
    scene.outbox.close()
    scene.outbox.close()
    assert scene.outbox.unacknowledged == 1
    scene.producer.hold_reports = False
    scene.producer.poll()
    assert one.pending == 1


def test_what_a_purge_reports_is_not_sent_again() -> None:
    scene = Scene()
    scene.broker.fail_next("results", E._PURGE_QUEUE)
    scene.send(result())
    for _ in range(5):
        assert scene.serve(10.0) == []
    assert scene.producer.calls == 1


def test_properties_that_the_client_refuses_are_a_mistake_in_the_settings() -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ck.KafkaException(E(E._INVALID_ARG, 'No such configuration property: "nope"'))

    with pytest.raises(ConfigError, match="nope"):
        Outbox({}, ENCODER, "dead", make_client=refuse).start()
