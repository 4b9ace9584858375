"""A connection to one of a worker's event sockets: the event loop's own.

libzmq would do, but it has a thread that has to be woken for each message and wakes the loop in turn, and a dozen
system calls; a message that comes alone costs several times as much there as what is done with it.
Owns: the connection, and what has come and nobody has read, WAITING_MAX_BYTES and one read more: then the other side
waits. Must never: parse a message, or connect again by itself once it was ready.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self, cast

from gateway.knowledge.zmtp import GREETING, Peer, ZmtpError, encode_message

WAITING_MAX_BYTES = 16 << 20
RETRY_S = 0.1
TCP, IPC = "tcp://", "ipc://"

Message = list[bytes]


class EventSocketLost(Exception):
    """The connection has ended, or could not be made; the message says why."""


class EventSocket(asyncio.Protocol):
    """connected() makes one, close() it after. One reader at a time.

    `take_alone` is offered what comes alone while a reader waits, and says whether it has dealt with it; the reader
    then goes on waiting. What it raises, the reader gets.
    """

    def __init__(self, peer: Peer) -> None:
        self.take_alone: Callable[[Message], bool] | None = None
        self._loop = asyncio.get_running_loop()
        self._peer = peer
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._messages: deque[Message] = deque()
        self._num_bytes = 0
        self._is_paused = False
        self._waiting: asyncio.Future[None] | None = None
        self._heard_at = 0.0
        self._was_full = False
        self._failure: Exception | None = None

    @classmethod
    async def connected(cls, address: str, new_peer: Callable[[], Peer], within_s: float) -> Self:
        """With what `new_peer` gives, which needs another for each try. TimeoutError when nobody there turns out to
        be its counterpart in time."""
        async with asyncio.timeout(within_s):
            while True:
                socket = cls(new_peer())
                try:
                    await socket._connect(address)
                    await socket._ready
                except (OSError, EventSocketLost):
                    await asyncio.sleep(RETRY_S)    # it may be about to come
                except BaseException:
                    socket.close()
                    raise
                else:
                    return socket

    async def _connect(self, address: str) -> None:
        if address.startswith(IPC):
            path = address.removeprefix(IPC)
            await self._loop.create_unix_connection(lambda: self, "\0" + path[1:] if path.startswith("@") else path)
            return
        host, _, port = address.removeprefix(TCP).rpartition(":")
        if not address.startswith(TCP) or not port.isdecimal():
            raise OSError(f"not an address to connect to: {address}")
        await self._loop.create_connection(lambda: self, host.strip("[]"), int(port))

    def close(self) -> None:
        """Let go of the connection."""
        if self._transport is not None:
            self._transport.abort()

    def send(self, frames: Sequence[bytes]) -> None:
        """One message."""
        if self._transport is not None:
            self._transport.write(encode_message(frames))

    async def lost(self) -> None:
        """Await the end of the connection, which is EventSocketLost."""
        await asyncio.shield(self._lost)

    async def receive(self, num_max: int, timeout_s: float) -> list[Message]:
        """At least one message, and up to `num_max` of those that are there already; none after so long a silence.

        However many there are, others on the loop get their turn in between.
        """
        if self._was_full:
            await asyncio.sleep(0)
        self._heard_at = self._loop.time()
        while not self._messages and self._failure is None:
            silent_at = self._heard_at + timeout_s
            if self._loop.time() >= silent_at:
                break
            await self._await_news(silent_at)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self._taken(num_max)

    async def _await_news(self, until: float) -> None:
        self._waiting = waiting = self._loop.create_future()
        timer = self._loop.call_at(until, _wake, waiting)
        try:
            await waiting
        finally:
            self._waiting = None
            timer.cancel()

    def _taken(self, num_max: int) -> list[Message]:
        waiting = self._messages
        taken = [waiting.popleft() for _ in range(min(num_max, len(waiting)))]
        self._num_bytes -= sum(map(_size, taken))
        self._was_full = len(taken) == num_max
        if self._is_paused and self._num_bytes <= WAITING_MAX_BYTES // 2 and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return taken

    # ---- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(GREETING)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        peer = self._peer
        try:
            messages = peer.feed(data)
        except ZmtpError as error:
            self._end(f"no events come from there: {error}")
            return
        if output := peer.taken_output():
            assert self._transport is not None
            self._transport.write(output)
            if peer.is_ready and not self._ready.done():
                self._ready.set_result(None)
        if messages and not (len(messages) == 1 and self._is_dealt_with(messages[0])):
            self._keep(messages)

    def _is_dealt_with(self, message: Message) -> bool:
        if self._waiting is None or self._messages or self.take_alone is None:
            return False
        self._heard_at = self._loop.time()
        try:
            return self.take_alone(message)
        except Exception as error:
            self._failure = error
            _wake(self._waiting)
            return True

    def _keep(self, messages: list[Message]) -> None:
        self._messages.extend(messages)
        self._num_bytes += sum(map(_size, messages))
        if self._num_bytes > WAITING_MAX_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        if self._waiting is not None:
            _wake(self._waiting)

    def eof_received(self) -> None:
        """See asyncio.Protocol. None closes our side too."""

    def connection_lost(self, reason: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end("the worker closed its event socket" if reason is None else
                  f"the connection to the worker's event socket was lost: {reason}")

    def _end(self, why: str) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        for future in (self._ready, self._lost):
            if not future.done():
                future.set_exception(EventSocketLost(why))
                future.exception()  # it may be that nobody asks
        self.take_alone = None


def _size(message: Message) -> int:
    return sum(map(len, message))


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
