"""Connections of clients, guarded: how many, how slow, how much of a head.

Owns: every limit on a connection before and after a request. Must never: look at what a client sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http import HttpVersion11
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_request import BaseRequest

from gateway.server.half_close import CAN_TELL, INTERIM, HalfClosed
from worker.protocol.http_mistakes import MAX_HEAD_BYTES, PrivateConnection

MAX_URL_BYTES = 8190
MAX_HEADER_BYTES = 8190
MAX_HEADERS = 128
KEEPALIVE_TIMEOUT_S = 75.0
# A request may be on its way from aiohttp's queue to its handler when its body is found to have no end.
LOST_BODY_S = 0.05
_TOO_MANY = (b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
             b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n"
             b'{"error":{"message":"Too many connections.","type":"server_error","param":null,"code":"no_worker"}}')

Answer = Callable[[BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`head_s`: from the first byte of a request, or the opening, to the end of its head. `stall_s`: without a client
    reading anything of an answer that is ready."""

    max_connections: int
    head_s: float
    stall_s: float


class GuardedServer(web.Server):
    """aiohttp's low-level server with limits. `on_refused` is told why a connection was cut: a metric label."""

    def __init__(self, answer: Answer, *, limits: ConnectionLimits, on_refused: Callable[[str], None]) -> None:
        super().__init__(self._guarded, handler_cancellation=True, access_log=None,
                         keepalive_timeout=KEEPALIVE_TIMEOUT_S, max_line_size=MAX_URL_BYTES,
                         max_field_size=MAX_HEADER_BYTES, max_headers=MAX_HEADERS)
        self._answer = answer
        self.limits = limits
        self.on_refused = on_refused
        self.num_open = 0

    def __call__(self) -> web.RequestHandler:
        """One connection's protocol."""
        return GuardedConnection(self, loop=self._loop, **self._kwargs)

    async def _guarded(self, request: BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, GuardedConnection)
        connection.head_arrived()
        try:
            return await self._answer(request)
        finally:
            connection.answered()


class GuardedConnection(PrivateConnection):
    """One client's connection. At any time one timer runs at the most: for a head, or for an answer to be read."""

    __slots__ = ("_awaits_head", "_body", "_busy", "_guard", "_half_closed", "_head_bytes", "_num_finished",
                 "_refused", "_timer", "_unread_bytes", "probe_stream")

    def __init__(self, server: GuardedServer, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._guard = server
        self._timer: asyncio.TimerHandle | None = None
        self._busy = self._refused = self._awaits_head = False
        self._unread_bytes = 0
        self._head_bytes = 0                    # read of a head that is not whole
        self._body: StreamReader | None = None  # of the request that was read last, while it may have more to come
        self._num_finished = 0
        self._half_closed: HalfClosed | None = None
        self.probe_stream: Callable[[], bool] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol. One connection too many is told so and closed, and costs nothing more."""
        self._guard.num_open += 1
        if self._guard.num_open > self._guard.limits.max_connections:
            self._refused = True
            self._guard.on_refused("connections")
            refused = cast(asyncio.Transport, transport)  # uvloop's are none by class
            refused.write(_TOO_MANY)
            refused.close()
            return
        super().connection_made(transport)
        self._start(self._guard.limits.head_s, self._head_is_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        self._guard.num_open -= 1
        self._stop()
        if self._half_closed is not None:
            self._half_closed.stop()
        self._half_closed = self.probe_stream = self._body = None  # each holds this connection
        if not self._refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. The first bytes of a request start its clock; more bytes do not wind it back."""
        if self._refused:
            return
        if not self._busy and not self._awaits_head:
            self._start(self._guard.limits.head_s, self._head_is_late)
        self._read(data)
        if self._is_lost():
            self._loop.call_later(LOST_BODY_S, self._end_open_bodies)

    def _read(self, data: bytes) -> None:
        """Give it to aiohttp, and see that no head gets longer than MAX_HEAD_BYTES, whole or not."""
        if self._body is not None and self._body.is_eof():
            self._body = None
        was_head, count = self._body is None, self._request_count
        super().data_received(data)
        if (num_read := self._request_count - count):
            self._body = self._messages[-1][1]
            if self._head_bytes + len(data) > MAX_HEAD_BYTES:
                self._check_heads(num_read)
            self._head_bytes = 0
        elif was_head and not (self._buffer_paused or self._upgraded or self._close or self._force_close):
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def _check_heads(self, num_read: int) -> None:
        """Of the requests read last, the first with too long a head is refused; what is behind it is not served."""
        for behind in range(num_read, 0, -1):
            message = self._messages[-behind][0]
            if isinstance(message, RawRequestMessage) and _head_bytes(message) > MAX_HEAD_BYTES:
                for _ in range(behind):
                    self._messages.pop()
                self._request_count -= behind
                self._refuse_head()
                return

    def _refuse_head(self) -> None:
        self._head_bytes, self._body = 0, None
        self._guard.on_refused("large_head")
        self.refuse_head()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """See asyncio.Protocol. Whoever stops sending may still want the answers to what it sent."""
        if self._half_closed is not None:
            return True  # told once more after a pause in reading
        transport = self.transport
        is_plain = transport is not None and transport.get_extra_info("sslcontext") is None
        if self._refused or not CAN_TELL or not is_plain or self._num_finished >= self._request_count:
            return None
        self._end_open_bodies()
        self._loop.call_later(LOST_BODY_S, self._end_open_bodies)
        assert transport is not None
        self._half_closed = HalfClosed(transport, probe=self._probe, can_be_probed=self._can_be_probed,
                                       left=transport.abort)
        return True

    def _can_be_probed(self) -> bool:
        """Sooner or later, that is; an answer to HTTP/1.0 has nothing to hold a probe before it begins."""
        request = self._current_request
        return self.probe_stream is not None or request is None or request.version >= HttpVersion11

    def _probe(self) -> bool:
        """Send what tells a client that waits from one that has left; False while there is nothing to send."""
        if self.probe_stream is not None:
            return self.probe_stream()
        request = self._current_request
        if self.transport is None or request is None or request.version < HttpVersion11 or request.writer.output_size:
            return False
        self.transport.write(INTERIM)
        return True

    async def finish_response(self, request: BaseRequest, resp: web.StreamResponse,
                              start_time: float | None) -> tuple[web.StreamResponse, bool]:
        """See RequestHandler. After the last answer to a client that has stopped sending, the connection ends."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.probe_stream = None
            self._num_finished += 1
            if self._half_closed is not None and self._num_finished >= self._request_count:
                self._half_closed.stop()
                self._close = True

    def head_arrived(self) -> None:
        """The head is complete and its handler begins; the body has limits of its own."""
        self._busy = True
        self._stop()
        if self._half_closed is not None or self._is_lost():
            self._end_open_bodies()  # of this request as well, should it not have begun when that was found out

    def answered(self) -> None:
        """The handler has ended; what it returned is now written."""
        self._busy = False
        self._unread_bytes = 0
        self._start(self._guard.limits.stall_s, self._answer_is_unread)

    def _start(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop()
        self._awaits_head = then == self._head_is_late
        self._timer = self._loop.call_later(seconds, then)

    def _stop(self) -> None:
        self._awaits_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if not self._busy and self.transport is not None:
            self._guard.on_refused("slow_head")
            self.transport.abort()

    def _answer_is_unread(self) -> None:
        self._timer = None
        transport = self.transport
        if self._busy or transport is None:
            return
        unread_bytes = transport.get_write_buffer_size()
        if not unread_bytes:
            return
        if unread_bytes == self._unread_bytes:
            self._guard.on_refused("slow_reader")
            transport.abort()
            return
        self._unread_bytes = unread_bytes
        self._start(self._guard.limits.stall_s, self._answer_is_unread)


def _head_bytes(message: RawRequestMessage) -> int:
    """How long a head was that has been read, but for blanks around its values."""
    line = len(message.method) + len(message.path) + len("  HTTP/1.1\r\n")
    return line + sum(len(name) + len(value) + len(": \r\n") for name, value in message.raw_headers) + len("\r\n")
