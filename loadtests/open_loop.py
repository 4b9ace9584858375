"""Requests at given instants over kept raw connections, whether or not earlier ones were answered: an open loop.

Owns: its connections. Must never: cost so much that it takes the CPU of what it measures; so nothing is parsed but
the status line and where an answer ends, and bodies are made beforehand.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from loadtests.bench.relay_client import is_whole


@dataclass(frozen=True, slots=True)
class Answered:
    """`first_byte_s` and `whole_s` count from the instant that the request was due, which was `due_s` after its run
    began; it was sent `late_s` later."""

    status: int
    first_byte_s: float
    whole_s: float
    due_s: float
    late_s: float


class _Connection(asyncio.Protocol):
    """One request at a time; `freed` is called with each answer."""

    def __init__(self, driver: OpenLoop) -> None:
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._due_at: float | None = None
        self._first_byte_s = self._late_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes, due_at: float) -> None:
        """Write it; the connection is taken until the answer is whole."""
        self._due_at = due_at
        self._late_s = self._loop.time() - due_at
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._due_at is None:
            return
        if not self._buffer:
            self._first_byte_s = self._loop.time() - self._due_at
        self._buffer += data
        if is_whole(self._buffer):
            status, self._buffer = int(self._buffer[9:12]), b""
            answered = Answered(status, self._first_byte_s, self._loop.time() - self._due_at,
                                self._due_at - self._driver.began_at, self._late_s)
            self._due_at = None
            self._driver.answered(self, answered)

    def connection_lost(self, reason: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._driver.lost(self, is_busy=self._due_at is not None)

    def close(self) -> None:
        """No more requests."""
        self._transport.close()


class OpenLoop:
    """To one port on 127.0.0.1. `head` ends before the value of Content-Length, the last header."""

    def __init__(self, port: int, path: str, headers: dict[str, str]) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._head = f"POST {path} HTTP/1.1\r\nHost: load\r\nContent-Type: application/json\r\n{lines}".encode()
        self._port = port
        self._idle: list[_Connection] = []
        self._num_running = 0
        self._all_done = asyncio.Event()
        self.began_at = 0.0
        self.answers: list[Answered] = []
        self.num_broken = 0

    async def run(self, bodies: Sequence[bytes], gaps_s: Sequence[float]) -> None:
        """Send each body its gap after the one before; return when every one has been answered."""
        loop = asyncio.get_running_loop()
        opening = set[asyncio.Task[None]]()
        self.began_at = loop.time()
        for body, after_s in zip(bodies, itertools.accumulate(gaps_s), strict=True):
            due_at = self.began_at + after_s
            if due_at > loop.time():
                await asyncio.sleep(due_at - loop.time())
            request = b"%bContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body)
            self._num_running += 1
            if self._idle:
                self._idle.pop().send(request, due_at)
            else:
                task = asyncio.create_task(self._on_new_connection(request, due_at))
                opening.add(task)
                task.add_done_callback(opening.discard)
        while self._num_running:
            self._all_done.clear()
            await self._all_done.wait()
        await asyncio.gather(*opening)
        while self._idle:
            self._idle.pop().close()

    async def _on_new_connection(self, request: bytes, due_at: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self), "127.0.0.1", self._port)
        except OSError:
            self.num_broken += 1
            self._ended()
        else:
            connection.send(request, due_at)

    def answered(self, connection: _Connection, answer: Answered) -> None:
        """One answer is whole, and its connection free."""
        self._idle.append(connection)
        self.answers.append(answer)
        self._ended()

    def lost(self, connection: _Connection, *, is_busy: bool) -> None:
        """The other side has closed a connection."""
        if connection in self._idle:
            self._idle.remove(connection)
        if is_busy:
            self.num_broken += 1
            self._ended()

    def _ended(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._all_done.set()
