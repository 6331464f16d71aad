"""The caller's side: send a request through Kafka and get its result, one at a time or as a stream.

    with Client("localhost:9092") as client:
        result = client.infer({"image": pixels}, timeout=5)
        for result in client.map({"image": pixels} for pixels in photos): ...

A client may be shared between threads. It follows the output topic from its end (without a consumer group), or a
reply topic of its own, with one thread of its own. It does not survive a fork: make it in the process that uses it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any, Self, Unpack

from forebay.calls import Call, Calls, ClientOptions, InferenceTimeoutError, Work, read, read_either
from forebay.records import Record, Reply
from forebay.settings import Kafka
from forebay.stream.exchange import ClosedError
from forebay.stream.publish import DeliveryError
from forebay.wire import InferenceError, Inputs, RequestOptions, Result, Tensor, WireEncoding, WireError

__all__ = [
    "AsyncClient",
    "Client",
    "ClosedError",
    "DeliveryError",
    "InferenceError",
    "InferenceTimeoutError",
    "Reply",
    "Result",
    "Tensor",
    "WireError",
]


class Client:
    """Sends requests and returns their results.

    `kafka` is the worker's own `kafka` section, or bootstrap servers, or None for the environment's
    (`FOREBAY_KAFKA__BOOTSTRAP_SERVERS`…). `timeout` is in seconds and also travels with each request, so that a
    worker drops what nobody waits for any more. `reply_to` names a topic (and partition) of this client's own; the
    worker must allow it in `kafka.reply_topics`. Connects at first use, or at `with`.
    """

    def __init__(
        self,
        kafka: Kafka | str | None = None,
        *,
        model: str | None = None,
        timeout: float = 30.0,
        encoding: WireEncoding = "binary",
        reply_to: Reply | str | None = None,
        connect_timeout: float = 10.0,
    ) -> None:
        self._calls = Calls(kafka, ClientOptions(model, timeout, encoding, reply_to, connect_timeout))

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Connect, if that has not happened yet.

        Raises KafkaUnavailableError with the address that failed, ConfigError for a topic that does not exist.
        """
        self._calls.open()

    def close(self) -> None:
        """Send what is queued, disconnect, and raise ClosedError where someone still waits."""
        self._calls.close()

    def infer(self, inputs: Inputs, *, timeout: float | None = None, **options: Unpack[RequestOptions]) -> Result:
        """Send one request and return its result.

        `inputs` are numpy arrays, lists, or `Tensor` by name; the first dimension of each is the rows. Raises
        InferenceError for an error result, InferenceTimeoutError, DeliveryError if the broker does not take the
        request, WireError if the inputs cannot travel.
        """
        return read(self._wait(self._calls.send(inputs, timeout, options)))

    def map(
        self,
        requests: Iterable[Work],
        *,
        window: int = 64,
        timeout: float | None = None,
        return_errors: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Result | InferenceError]:
        """Yield the result of each request, in order; `window` requests are under way at once.

        A request is its inputs, or a pair (id, inputs); the result carries the id. `requests` is consumed no faster
        than results are taken. An error result is raised at its turn, or yielded with `return_errors`.
        """
        take = read_either if return_errors else read
        under_way: deque[Call] = deque()
        try:
            for work in requests:
                under_way.append(self._calls.send_work(work, timeout, options))
                if len(under_way) >= window:
                    yield take(self._wait(under_way.popleft()))
            while under_way:
                yield take(self._wait(under_way.popleft()))
        finally:
            for call in under_way:
                self._calls.abandon(call)

    def _wait(self, call: Call) -> Record:
        try:
            return call.sent.future.result(call.remaining)
        except TimeoutError as error:
            raise self._calls.late(call) from error
        except BaseException:
            self._calls.abandon(call)
            raise


class AsyncClient:
    """The same for asyncio: `await client.infer(…)`, `async for result in client.map(…)`.

    Takes what `Client` takes. Connecting and sending run in threads, waiting does not.
    """

    def __init__(self, kafka: Kafka | str | None = None, **options: Any) -> None:
        self._calls = Calls(kafka, ClientOptions(**options))

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._calls.open)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Send what is queued, disconnect, and raise ClosedError where someone still waits."""
        await asyncio.to_thread(self._calls.close)

    async def infer(self, inputs: Inputs, *, timeout: float | None = None, **options: Unpack[RequestOptions]) -> Result:
        """Send one request and return its result; raises what `Client.infer` raises."""
        return read(await self._wait(await asyncio.to_thread(self._calls.send, inputs, timeout, options)))

    async def map(
        self,
        requests: Iterable[Work] | AsyncIterable[Work],
        *,
        window: int = 64,
        timeout: float | None = None,
        return_errors: bool = False,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[Result | InferenceError]:
        """Yield the result of each request, in order, as `Client.map` does; `requests` may be asynchronous."""
        take = read_either if return_errors else read
        under_way: deque[Call] = deque()
        try:
            async for work in _each(requests):
                under_way.append(await asyncio.to_thread(self._calls.send_work, work, timeout, options))
                if len(under_way) >= window:
                    yield take(await self._wait(under_way.popleft()))
            while under_way:
                yield take(await self._wait(under_way.popleft()))
        finally:
            for call in under_way:
                self._calls.abandon(call)

    async def _wait(self, call: Call) -> Record:
        if call.sent.future.done():  # wait_for would give up on it if the time is over
            return call.sent.future.result()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call.sent.future), call.remaining)
        except TimeoutError as error:
            raise self._calls.late(call) from error
        except BaseException:
            self._calls.abandon(call)
            raise


async def _each(requests: Iterable[Work] | AsyncIterable[Work]) -> AsyncIterator[Work]:
    if isinstance(requests, AsyncIterable):
        async for work in requests:
            yield work
    else:
        for work in requests:
            yield work
