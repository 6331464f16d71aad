"""A TCP proxy between a worker and its broker, to freeze, cut and delay what passes, by who sends it and what it asks.

It reads of Kafka's frames the length, the API key, the correlation id and the client's name, and changes nothing. All
of it runs on one thread of its own; a test sets its faults from outside. Only connections of a worker are hurt.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.broker import free_port

HOST = "127.0.0.1"
PRODUCE, FETCH, JOIN_GROUP, INIT_PRODUCER_ID, END_TXN = 0, 1, 11, 22, 26
_LOOK_SECONDS = 0.01
_FRAMES = 64


@dataclass(eq=False, slots=True)
class Link:
    """One connection of a client: who it is, what it has asked for, and which answers it waits for."""

    client: asyncio.StreamWriter
    broker: asyncio.StreamWriter
    client_id: str = ""
    asked: set[int] = field(default_factory=set)
    waiting: dict[int, int] = field(default_factory=dict)

    def notes(self, request: bytes) -> int:
        """Take in a request; return its API key."""
        key, correlation = int.from_bytes(request[4:6], "big"), int.from_bytes(request[8:12], "big")
        length = int.from_bytes(request[12:14], "big", signed=True)
        self.client_id = request[14 : 14 + max(length, 0)].decode(errors="replace")
        self.asked.add(key)
        self.waiting[correlation] = key
        return key

    def answers(self, answer: bytes) -> int:
        """Return the API key of the request that an answer belongs to."""
        return self.waiting.get(int.from_bytes(answer[4:8], "big"), -1)

    def passed(self, answer: bytes) -> None:
        """Note that an answer has gone through."""
        self.waiting.pop(int.from_bytes(answer[4:8], "big"), None)

    @property
    def is_workers(self) -> bool:
        """Whether a worker opened it; the test's own clients have other names."""
        return self.client_id == "forebay"

    def abort(self) -> None:
        """Cut it on both sides, as a reset does."""
        self.client.transport.abort()
        self.broker.transport.abort()


Chosen = Callable[[Link], bool]


def everything(link: Link) -> bool:
    """Choose all connections of the worker."""
    return link.is_workers


def producers(link: Link) -> bool:
    """Choose the connections over which the worker's outcomes go."""
    return link.is_workers and bool({PRODUCE, INIT_PRODUCER_ID, END_TXN} & link.asked)


def consumers(link: Link) -> bool:
    """Choose the connections over which the worker reads, commits and keeps its membership."""
    return link.is_workers and bool({FETCH, JOIN_GROUP} & link.asked)


class Proxy:
    """Listens on `port` and passes everything on to `target`."""

    def __init__(self, target: int) -> None:
        self.port = free_port({target})
        self.links: set[Link] = set()
        self.delay_seconds = 0.0
        self._target = target
        self._frozen: Chosen | None = None
        self._held_requests: int | None = None
        self._held_answers: int | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> Proxy:
        """Listen."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(asyncio.start_server(self._accept, HOST, self.port), self._loop).result(10)
        return self

    def stop(self) -> None:
        """Cut everything and end the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def freeze(self, chosen: Chosen) -> None:
        """Let nothing of these connections pass: they stay open, and what is sent arrives after `heal`."""
        self._frozen = chosen

    def cut(self, chosen: Chosen) -> int:
        """Reset these connections; new ones are let through. Returns their number."""
        gone = [link for link in tuple(self.links) if chosen(link)]
        for link in gone:
            self._loop.call_soon_threadsafe(link.abort)
        return len(gone)

    def hold(self, *, requests: int | None = None, answers: int | None = None) -> None:
        """Hold back the worker's requests of an API key, or the answers to them, and all behind them."""
        self._held_requests, self._held_answers = requests, answers

    def heal(self) -> None:
        """Let everything through, with what was held back."""
        self._frozen = self._held_requests = self._held_answers = None
        self.delay_seconds = 0.0

    def holds(self, key: int) -> int:
        """Return how many requests of this API key wait for their answer."""
        return sum(list(link.waiting.values()).count(key) for link in tuple(self.links))

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for link in self.links:
            link.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, broker = await asyncio.open_connection(HOST, self._target)
        except OSError:
            writer.transport.abort()
            return
        link = Link(writer, broker)
        self.links.add(link)
        up = self._pump(link, reader, broker, is_request=True)
        await asyncio.gather(up, self._pump(link, answers, writer, is_request=False))
        self.links.discard(link)

    async def _pump(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_request: bool
    ) -> None:
        """Pass one direction on, frame by frame. What was read before the sender went away is still delivered."""
        frames: asyncio.Queue[tuple[float, bytes, int] | None] = asyncio.Queue(_FRAMES)
        sender = asyncio.create_task(self._send(link, frames, writer, is_request=is_request))
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                size = await reader.readexactly(4)
                frame = size + await reader.readexactly(int.from_bytes(size, "big"))
                key = link.notes(frame) if is_request else link.answers(frame)
                due = self._loop.time() + (self.delay_seconds if link.is_workers else 0.0)
                await frames.put((due, frame, key))
        await frames.put(None)
        await sender

    async def _send(
        self,
        link: Link,
        frames: asyncio.Queue[tuple[float, bytes, int] | None],
        writer: asyncio.StreamWriter,
        *,
        is_request: bool,
    ) -> None:
        while (entry := await frames.get()) is not None:
            due, frame, key = entry
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            while self._is_held(link, key, is_request=is_request):
                await asyncio.sleep(_LOOK_SECONDS)
            with contextlib.suppress(OSError):
                writer.write(frame)
                await writer.drain()
            if not is_request:
                link.passed(frame)
        writer.close()

    def _is_held(self, link: Link, key: int, *, is_request: bool) -> bool:
        if not link.is_workers:
            return False
        held = self._held_requests if is_request else self._held_answers
        return key == held or (self._frozen is not None and self._frozen(link))
