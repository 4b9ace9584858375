"""One connection to a worker, and one exchange on it.

Owns: the bytes on their way (written at once, read only as fast as they are taken), and that a connection which is
cut is cut now: a worker stops computing when its client goes.
Must never: retry, or give back a connection whose request or response has not ended.
Approximation: reading pauses after the read that passed MAX_BUFFERED_BYTES, so up to one read more is held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from gateway.relay.deadline import Deadline
from gateway.relay.response_parser import ResponseParser
from gateway.relay.upstream import FailureKind, Take, Takers, UpstreamFailure

MAX_BUFFERED_BYTES = 64 * 1024
JOINED_BODY_BYTES = 64 * 1024  # up to here one copy is cheaper than a second buffer


class Connection(asyncio.Protocol):
    """A transport's protocol. Each exchange ends with `freed` (it may serve again) or `lost` (it is gone)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, freed: Callable[[Connection], None],
                 lost: Callable[[Connection], None]) -> None:
        self.loop = loop
        self._freed = freed
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._is_paused = False
        self.idle_since = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent now."""
        return self._transport is not None and self._exchange is None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, *, is_head: bool) -> Exchange:
        """Write one request; the exchange that will hold its response."""
        assert self._transport is not None, "send() is for a connection that is_usable"
        assert self._exchange is None, "one exchange at a time"
        self._exchange = exchange = Exchange(self, ResponseParser(is_head=is_head))
        if len(body) <= JOINED_BODY_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return exchange

    def free(self) -> None:
        """The exchange has ended well. A request that is still being written ends the connection: it was refused."""
        self._exchange = None
        if self._transport is None or self._transport.is_closing() or self._transport.get_write_buffer_size():
            self.cut()
            return
        if self._is_paused:
            self.resume()
        self._freed(self)

    def cut(self) -> None:
        """Close at once, whatever is under way. Idempotent."""
        self._end("the gateway closed the connection")

    def pause(self) -> None:
        """Read no more until resume(): the kernel's buffers then fill, and the worker waits."""
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    # ---- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. Bytes that nobody asked for make a connection unusable."""
        exchange = self._exchange
        if exchange is None:
            self.cut()
        elif (take := exchange.take_framed) is None or not take(data):
            exchange.received(data)

    def eof_received(self) -> None:
        """See asyncio.Protocol. A worker that has ended its side has ended the exchange; None closes the other."""
        if self._exchange is not None:
            self._exchange.ended()
        else:
            self.cut()

    def connection_lost(self, reason: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end(str(reason or "the connection was closed") or type(reason).__name__)

    def _end(self, why: str) -> None:
        exchange, self._exchange = self._exchange, None
        transport, self._transport = self._transport, None
        if exchange is not None:
            exchange.broke(why)
        if transport is not None:
            transport.abort()
            self._lost(self)


class Exchange:
    """One request's response: an UpstreamResponse once head_arrived() has returned."""

    __slots__ = ("_chunks", "_connection", "_deadline", "_failure", "_loop", "_num_buffered", "_parser", "_takers",
                 "_waiter", "connect_s", "got_bytes", "headers", "on_news", "status", "take_framed")

    def __init__(self, connection: Connection, parser: ResponseParser) -> None:
        self._connection: Connection | None = connection  # None once it has been given back or cut
        self._loop = connection.loop
        self._parser = parser
        self._chunks: list[bytes] = []
        self._num_buffered = 0
        self._failure: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._takers: Takers | None = None  # while a reader waits, and only until it is woken
        self.take_framed: Take | None = None  # theirs, while what comes next begins a chunk
        self._deadline: Deadline | None = None
        self.connect_s = 0.0
        self.got_bytes = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.on_news: Callable[[], None] | None = None  # called whenever something has arrived, or an end

    # ---- the reader's side ---------------------------------------------------------------------------------------

    async def head_arrived(self) -> None:
        """Await status and headers; UpstreamFailure(RESET) when they do not come."""
        while (head := self._parser.head) is None:
            self._raise_failure()
            await self._wait(None)
        self.status, self.headers = head.status, head.headers

    async def read_chunk(self, within_s: float | None = None, takers: Takers | None = None) -> bytes:
        """See UpstreamResponse."""
        due_at = None
        while not self._chunks:
            self._raise_failure()
            if self._parser.is_complete:
                return b""
            if within_s is not None and due_at is None:
                due_at = self._loop.time() + within_s
            self._offer(takers)
            await self._wait(due_at)
        chunks = self._chunks
        chunk = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._num_buffered = 0
        if self._connection is not None:
            self._connection.resume()
        return chunk

    def whole(self) -> bytes | None:
        """The body, if the whole response is here and well; None while it is not, or is known to have failed."""
        head = self._parser.head
        if not self._parser.is_complete or self._failure is not None or head is None:
            return None
        self.status, self.headers = head.status, head.headers
        return b"".join(self._chunks)

    def stream_began(self) -> bytes | None:
        """What has come of a body that goes on, if it begins well; it still is to be read."""
        head = self._parser.head
        if head is None or self._connection is None or not self._chunks:
            return None
        self.status, self.headers = head.status, head.headers
        return b"".join(self._chunks)

    def pass_on(self, takers: Takers) -> None:
        """Nobody reads: what has come is dealt with, and what comes is for `takers`; on_news tells of what is not."""
        self._chunks.clear()
        self._num_buffered = 0
        self._offer(takers)
        if self._connection is not None:
            self._connection.resume()

    def hold(self) -> None:
        """The end of pass_on(): what comes from now on is for a reader."""
        self._offer(None)

    @property
    def is_over(self) -> bool:
        """Whether all of it came, well, and is dealt with."""
        return self._parser.is_complete and self._failure is None and not self._chunks

    @property
    def has_body_or_end(self) -> bool:
        """Whether there is something to read: body bytes, the end, or a failure."""
        return bool(self._chunks) or self._connection is None

    def close(self) -> None:
        """See UpstreamResponse."""
        if self._connection is not None:
            self._end("closed by the reader")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise UpstreamFailure(FailureKind.RESET, self._failure)

    async def _wait(self, due_at: float | None) -> None:
        assert self._waiter is None, "one reader at a time"
        self._waiter = self._loop.create_future()
        if due_at is not None:
            if self._deadline is None:
                self._deadline = Deadline(self._loop, self._nothing_came)
            self._deadline.set(due_at)
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._offer(None)
            if self._deadline is not None:
                self._deadline.lift()

    def _offer(self, takers: Takers | None) -> None:
        """What comes next, until the reader is woken."""
        self._takers = takers
        self.take_framed = takers.take_framed if takers is not None and self._parser.is_at_chunk else None

    def _nothing_came(self) -> None:
        self._offer(None)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    # ---- the connection's side -----------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Bytes have arrived."""
        self.got_bytes = True
        parser, takers = self._parser, self._takers
        body = parser.feed(data)
        if body:
            if takers is not None and takers.take(body):
                if not parser.is_complete and parser.failure is None:
                    self._offer(takers)
                    return
            else:
                self._chunks.append(body)
                self._num_buffered += len(body)
        if parser.is_complete or parser.failure is not None:
            self._end(parser.failure)
        elif self._num_buffered > MAX_BUFFERED_BYTES and self._connection is not None:
            self._connection.pause()
        self._wake()

    def ended(self) -> None:
        """The worker has ended its side."""
        self._parser.eof()
        self._end(self._parser.failure)
        self._wake()

    def broke(self, why: str) -> None:
        """The connection is gone, unless this exchange had done with it before."""
        if self._connection is not None:
            self._connection = None
            self._end(why)
            self._wake()

    def _end(self, failure: str | None) -> None:
        self._failure = failure
        if self._deadline is not None:
            self._deadline.close()
            self._deadline = None  # it holds this exchange
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if failure is None and self._parser.is_reusable:
            connection.free()
        else:
            connection.cut()

    def _wake(self) -> None:
        self._offer(None)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif self.on_news is not None:
            self.on_news()
