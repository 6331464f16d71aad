"""A stand-in for a worker, for tests of the caller's side: answers each request with its own inputs, on a thread.

Written with confluent-kafka alone, so that a test of our client does not depend on our worker.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from types import TracebackType

from confluent_kafka import Consumer, Message, Producer

from forebay.records import Code, Headers
from forebay.wire import build_error, build_result, parse_request

Answer = Callable[[Message], "tuple[bytes, Headers] | None"]
ECHOED = ("kafka_correlationId", "correlation_id", "traceparent")


def echo(message: Message) -> tuple[bytes, Headers] | None:
    """Answer with the inputs, or with an error if an input is called `fail`, or not at all if one is called `mute`."""
    request = parse_request(message.value(), message.headers() or [])
    if "mute" in request.tensors:
        return None
    if "fail" in request.tensors:
        return build_error(request.id or "", Code.MODEL_ERROR, "it was asked to fail")
    return build_result(request.inputs, id=request.id or "", model="echo", version="1", encoding=request.encoding)


class Responder:
    """Answers requests of `topic` on `output`, or where a request asks for it if `obeys_reply`."""

    def __init__(
        self, servers: str, topic: str, output: str, *, answer: Answer = echo, times: int = 1, obeys_reply: bool = True
    ) -> None:
        self._servers = servers
        self._topic = topic
        self._output = output
        self._answer = answer
        self._times = times
        self._obeys_reply = obeys_reply
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seen: list[Message] = []

    def __enter__(self) -> Responder:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(20)

    def _run(self) -> None:
        quiet = {"bootstrap.servers": self._servers, "log_level": 0}
        consumer = Consumer(quiet | {"group.id": f"{self._topic}-echo", "auto.offset.reset": "earliest"})
        producer = Producer(quiet | {"linger.ms": 0})
        consumer.subscribe([self._topic])
        while not self._stopping.is_set():
            message = consumer.poll(0.05)
            producer.poll(0)
            if message is not None and not message.error():
                self.seen.append(message)
                self._reply(producer, message)
        producer.flush(5)
        consumer.close()

    def _reply(self, producer: Producer, message: Message) -> None:
        answered = self._answer(message)
        if answered is None:
            return
        value, headers = answered
        asked = dict(message.headers() or [])
        echoed = [(name, asked[name]) for name in ECHOED if name in asked]
        source = f"{message.topic()}/{message.partition()}/{message.offset()}".encode()
        topic, partition = self._output, -1
        if self._obeys_reply and "kafka_replyTopic" in asked:
            topic = asked["kafka_replyTopic"].decode()
            if "kafka_replyPartition" in asked:
                (partition,) = struct.unpack(">i", asked["kafka_replyPartition"])
        elif "kafka_replyTopic" in asked:
            value, headers = build_error("?", Code.REPLY_NOT_ALLOWED, "this topic may not be named")
        for _ in range(self._times):
            producer.produce(
                topic,
                value,
                message.key(),
                partition,
                headers=[*headers, *echoed, ("source", source), ("batch-size", b"1")],
            )
