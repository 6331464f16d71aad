"""The client against real Kafka; a stand-in answers, so that only the caller's side is on trial."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from forebay.client import (
    AsyncClient,
    Client,
    ClosedError,
    DeliveryError,
    InferenceError,
    InferenceTimeoutError,
    Reply,
    Tensor,
    WireError,
)
from forebay.errors import ConfigError, KafkaUnavailableError
from forebay.settings import Kafka
from tests.conftest import EmbeddedKafkas, Topics
from tests.integration.responder import Responder
from tests.kafka_probe import KafkaProbe, eventually


@pytest.fixture
def section(kafka: KafkaProbe, topics: Topics) -> Kafka:
    requests, results = topics("requests", "results", partitions=3)
    return Kafka(
        bootstrap_servers=kafka.bootstrap_servers,
        input_topics=(requests,),
        output_topic=results,
        dead_letter_topic="unused",
    )


def responder(section: Kafka, **options: object) -> Responder:
    return Responder(section.bootstrap_servers, section.input_topics[0], section.output_topic, **options)


def test_a_request_returns_its_result_as_arrays(section: Kafka) -> None:
    image = np.arange(12, dtype=np.uint8).reshape(1, 3, 4)
    with responder(section) as echo, Client(section) as client:
        result = client.infer({"image": image, "text": ["é"], "half": Tensor([[1.5]], "FP16")}, id="a", timeout=30)
    np.testing.assert_array_equal(result["image"], image)
    assert result["text"] == ["é".encode()]
    assert result["half"].dtype == np.float16
    assert (result.id, result.model, result.batch_size) == ("a", "echo", 1)
    assert result.source == f"{section.input_topics[0]}/{echo.seen[0].partition()}/0"
    assert echo.seen[0].key() == b"a"
    assert dict(echo.seen[0].headers())["timeout-ms"] == b"30000"


def test_json_requests_come_back_as_arrays_too(section: Kafka) -> None:
    with responder(section), Client(section, encoding="json") as client:
        result = client.infer({"x": [[0.25, -1]]}, timeout=30)
    np.testing.assert_array_equal(result["x"], np.array([[0.25, -1]], np.float32))


def test_an_error_result_is_raised_with_its_code(section: Kafka) -> None:
    with responder(section), Client(section) as client, pytest.raises(InferenceError, match="asked to fail") as caught:
        client.infer({"fail": [1]}, id="bad", timeout=30)
    assert (caught.value.code, caught.value.retriable, caught.value.id) == ("model_error", False, "bad")
    assert caught.value.source is not None


def test_what_was_published_before_the_client_connected_is_not_read(section: Kafka, kafka: KafkaProbe) -> None:
    kafka.produce(section.output_topic, [b"not a result at all", None])
    with responder(section), Client(section) as client:
        assert client.infer({"x": [1]}, timeout=30)["x"].tolist() == [1]


def test_results_of_others_and_duplicates_are_passed_over(section: Kafka, kafka: KafkaProbe) -> None:
    with responder(section, times=3), Client(section) as client:
        client.open()
        kafka.produce(section.output_topic, [b"someone else's"])
        assert [client.infer({"x": [n]}, timeout=30)["x"].tolist() for n in range(5)] == [[n] for n in range(5)]


def test_map_yields_every_result_in_order_with_its_id(section: Kafka) -> None:
    with responder(section), Client(section) as client:
        work = ((f"id-{n}", {"x": [n]}) for n in range(500))
        results = list(client.map(work, window=50, timeout=60))
    assert [(result.id, result["x"].tolist()) for result in results] == [(f"id-{n}", [n]) for n in range(500)]


def test_map_takes_no_more_requests_than_its_window_ahead(section: Kafka) -> None:
    taken = 0

    def work() -> object:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield {"x": [number]}

    with responder(section), Client(section) as client:
        results = client.map(work(), window=4, timeout=30)
        for yielded in range(1, 11):
            next(results)
            assert taken == yielded + 3
        results.close()


def test_map_raises_an_error_at_its_turn_or_yields_it(section: Kafka) -> None:
    work = [("a", {"x": [1]}), ("b", {"fail": [1]}), ("c", {"x": [3]})]
    with responder(section), Client(section) as client:
        kinds = [type(result).__name__ for result in client.map(work, return_errors=True, timeout=30)]
        assert kinds == ["Result", "InferenceError", "Result"]
        stream = client.map(work, timeout=30)
        assert next(stream).id == "a"
        with pytest.raises(InferenceError):
            next(stream)


def test_a_timeout_says_that_the_broker_has_the_request_and_nobody_answers(section: Kafka) -> None:
    with Client(section) as client, pytest.raises(InferenceTimeoutError) as caught:
        client.infer({"x": [1]}, id="lonely", timeout=2)
    assert isinstance(caught.value, TimeoutError)
    assert "request lonely within 2 s" in str(caught.value)
    assert f"it is {section.input_topics[0]}/" in str(caught.value)
    assert "is a worker running" in str(caught.value)


def test_a_timeout_says_that_the_worker_is_behind_if_others_are_answered(section: Kafka) -> None:
    with responder(section), Client(section) as client, Client(section) as other:

        def chatter() -> None:
            for number in range(20):
                other.infer({"x": [number]}, timeout=30)

        thread = threading.Thread(target=chatter)
        thread.start()
        with pytest.raises(InferenceTimeoutError, match="outcomes of other requests arrived"):
            client.infer({"mute": [1]}, timeout=5)
        thread.join()


def test_one_client_serves_many_threads(section: Kafka) -> None:
    with responder(section), Client(section) as client, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: client.infer({"x": [n]}, timeout=60)["x"].tolist(), range(200)))
    assert answers == [[n] for n in range(200)]


def test_a_reply_topic_and_partition_of_its_own_get_the_result(section: Kafka, topics: Topics) -> None:
    (inbox,) = topics("inbox", partitions=4)
    with responder(section) as echo, Client(section, reply_to=Reply(inbox, 2)) as client:
        assert client.infer({"x": [7]}, timeout=30)["x"].tolist() == [7]
        assert client.infer({"x": [8]}, timeout=30)["x"].tolist() == [8]
    headers = dict(echo.seen[0].headers())
    assert headers["kafka_replyTopic"] == inbox.encode()
    assert headers["kafka_replyPartition"] == b"\x00\x00\x00\x02"


def test_a_refused_reply_topic_is_told_at_once(section: Kafka, topics: Topics) -> None:
    (inbox,) = topics("inbox")
    with (
        responder(section, obeys_reply=False),
        Client(section, reply_to=inbox) as client,
        pytest.raises(InferenceError) as caught,
    ):
        client.infer({"x": [1]}, timeout=30)
    assert caught.value.code == "reply_not_allowed"


def test_a_correlation_id_of_the_callers_own_is_kept(section: Kafka) -> None:
    with responder(section) as echo, Client(section) as client:
        result = client.infer({"x": [1]}, timeout=30, headers=[("kafka_correlationId", b"\xff\x00mine")])
    assert ("kafka_correlationId", b"\xff\x00mine") in result.headers
    assert [key for key, _ in echo.seen[0].headers()].count("kafka_correlationId") == 1


def test_a_request_that_is_too_large_for_the_broker_is_a_delivery_error(section: Kafka) -> None:
    with Client(section) as client, pytest.raises(DeliveryError, match=r"(?i)too large"):
        client.infer({"x": np.zeros((1, 3_000_000), np.uint8)}, timeout=30)


def test_a_missing_topic_is_told_with_the_command_that_creates_it(section: Kafka) -> None:
    missing = section.model_copy(update={"input_topics": ("nowhere",)})
    with pytest.raises(
        ConfigError,
        match=r"topic nowhere does not exist .*create it: forebay topics .*kafka-topics.sh .*--topic nowhere",
    ):
        Client(missing).open()


def test_an_address_where_nothing_listens_is_named() -> None:
    with pytest.raises(KafkaUnavailableError, match=r"127\.0\.0\.1:1\b.*refused"):
        Client("127.0.0.1:1", connect_timeout=2).open()


def test_inputs_that_cannot_travel_are_refused_before_anything_is_sent(section: Kafka, kafka: KafkaProbe) -> None:
    with Client(section) as client, pytest.raises(WireError, match="x: complex128 is no datatype"):
        client.infer({"x": np.array([1j])})
    assert sum(kafka.end_offsets(section.input_topics[0]).values()) == 0


def test_closing_ends_every_wait_and_every_later_use(section: Kafka) -> None:
    client = Client(section)
    client.open()
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            client.infer({"x": [1]}, timeout=60)
        except ClosedError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: client._calls._exchange and client._calls._exchange._waiting, "the request is under way")
    client.close()
    thread.join(30)
    assert len(failures) == 1
    client.close()
    with pytest.raises(ClosedError):
        client.infer({"x": [1]})


def test_the_async_client_infers_side_by_side_and_streams_in_order(section: Kafka) -> None:
    async def use() -> None:
        async with AsyncClient(section, timeout=60) as client:
            results = await asyncio.gather(*(client.infer({"x": [n]}) for n in range(50)))
            assert [result["x"].tolist() for result in results] == [[n] for n in range(50)]

            async def work() -> object:
                for number in range(100):
                    yield str(number), {"x": [number]}

            assert [result.id async for result in client.map(work(), window=10)] == [str(n) for n in range(100)]
            with pytest.raises(InferenceError):
                await client.infer({"fail": [1]})
            with pytest.raises(InferenceTimeoutError, match="acknowledged after"):
                await client.infer({"mute": [1]}, timeout=1)

    with responder(section):
        asyncio.run(use())


def test_a_cancelled_request_is_forgotten(section: Kafka) -> None:
    async def use() -> None:
        async with AsyncClient(section, timeout=60) as client:
            task = asyncio.create_task(client.infer({"mute": [1]}))
            while client._calls._exchange is None or not client._calls._exchange._waiting:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not client._calls._exchange._waiting
            assert (await client.infer({"x": [1]}))["x"].tolist() == [1]

    with responder(section):
        asyncio.run(use())


@pytest.mark.slow
def test_a_client_goes_on_after_its_broker_was_killed_and_came_back(embedded_kafka: EmbeddedKafkas) -> None:
    cluster = embedded_kafka()
    probe = KafkaProbe(cluster.bootstrap_servers)
    probe.create_topics({"requests": 2, "results": 2})
    section = Kafka(bootstrap_servers=cluster.bootstrap_servers, input_topics=("requests",), output_topic="results")
    with responder(section), Client(section, timeout=120) as client:
        assert client.infer({"x": [1]})["x"].tolist() == [1]
        cluster.kill()
        with pytest.raises(InferenceTimeoutError, match="the broker has not acknowledged the request"):
            client.infer({"x": [2]}, timeout=2)
        cluster.restart()
        assert client.infer({"x": [3]})["x"].tolist() == [3]
