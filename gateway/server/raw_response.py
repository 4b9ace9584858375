"""Answers that go to the client's transport in as few steps as they need, past aiohttp's response machinery.

Owns: the bytes of a whole response in one write, and a stream's chunk framing once aiohttp has sent its head.
Must never: be used before the head is final; what aiohttp knows of the connection (keep-alive, HTTP version, a client
that is slow or gone) is asked, not remembered.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Collection, Mapping
from email.utils import formatdate
from http import HTTPStatus

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11
from aiohttp.web_request import BaseRequest

from gateway.relay.http_head import head_bytes
from gateway.relay.sse import is_event_stream
from gateway.server.connections import GuardedConnection
from worker.protocol.http_mistakes import SERVER

PROBE_COMMENT = b":\n\n"
LAST_CHUNK = b"0\r\n\r\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
CHUNKED_EVENTS: Mapping[str, str] = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}" for status in HTTPStatus}


class _PastAiohttp(web.StreamResponse):
    """A response whose head aiohttp does not make: whether the connection stays is known here."""

    _is_kept_alive = True

    @property
    def keep_alive(self) -> bool:
        """Whether the connection serves another request."""
        return self._is_kept_alive

    def force_close(self) -> None:
        """End the connection after this response."""
        self._is_kept_alive = False


class WholeResponse(_PastAiohttp):
    """A response with its whole body. It is sent when aiohttp prepares it; until then headers may be added."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(status=status, headers=headers)
        self._whole_body = body
        self._is_sent = False
        self._writer: AbstractStreamWriter | None = None

    @property
    def prepared(self) -> bool:
        """Whether it is on its way."""
        return self._is_sent

    async def prepare(self, request: BaseRequest) -> AbstractStreamWriter | None:
        """Send it, in one write."""
        if self._is_sent:
            return None
        self._is_sent = True
        self._writer = request.writer
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        self._is_kept_alive = self._is_kept_alive and request.keep_alive
        transport.write(self._head(request) + self._whole_body)
        return self._writer

    async def write_eof(self, data: bytes = b"") -> None:
        """Await the client, should it be slow."""
        if self._writer is not None:
            await self._writer.drain()

    def _head(self, request: BaseRequest) -> bytes:
        connection = None
        if not self._is_kept_alive:
            connection = "close"
        elif request.version < HttpVersion11:
            connection = "keep-alive"
        return whole_head(self.status, self.headers.items(), len(self._whole_body), connection)


def whole_head(status: int, headers: Collection[tuple[str, str]], num_body_bytes: int,
               connection: str | None) -> bytes:
    """The head of an answer whose body is known; `connection` where it is not what the version implies."""
    start = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} "
    beginning = f"{start}\r\nContent-Length: {num_body_bytes}\r\nDate: {_date()}"
    if connection is not None:
        beginning = f"{beginning}\r\nConnection: {connection}"
    return head_bytes(beginning, headers)


def stream_beginning(headers: Collection[tuple[str, str]], data: bytes) -> bytes:
    """The head of a stream and its first chunk."""
    beginning = f"{_STATUS_LINES[200]}\r\nTransfer-Encoding: chunked\r\nDate: {_date()}"
    return head_bytes(beginning, headers) + b"%x\r\n%b\r\n" % (len(data), data)


class UnmeasuredResponse(web.StreamResponse):
    """A body whose length nobody knows: framed by chunks, or by the end of the connection where those are unknown."""

    async def prepare(self, request: BaseRequest) -> AbstractStreamWriter | None:
        """Send the head. aiohttp forgets that nothing else ends the body of an HTTP/1.0 client that wants to stay."""
        if request.version < HttpVersion11:
            self.force_close()
        self.headers.setdefault(hdrs.SERVER, SERVER)
        return await super().prepare(request)


class EventStream(UnmeasuredResponse):
    """A response whose head goes along with the first bytes of its body, in one write."""

    _send_headers_immediately = False


class BegunStream(_PastAiohttp):
    """A stream of events whose head and first bytes have gone out past aiohttp."""

    def __init__(self, request: BaseRequest) -> None:
        super().__init__(headers=CHUNKED_EVENTS)
        self._request = request
        self._is_kept_alive = request.keep_alive
        request.writer.output_size += 1     # so that nobody begins another answer

    @property
    def prepared(self) -> bool:
        """Whether it is on its way."""
        return True

    async def prepare(self, request: BaseRequest) -> AbstractStreamWriter | None:
        """Nothing is left to do."""
        return request.writer

    async def write_eof(self, data: bytes = b"") -> None:
        """Send the end, once, and await the client, should it be slow."""
        if not self._eof_sent:
            self._eof_sent = True
            transport = self._request.transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError("the client has left")
            transport.write(LAST_CHUNK)
            await self._request.writer.drain()


class ChunkSender:
    """The chunks of a stream to a client that takes them as they come. `last`: what it has of the stream already."""

    __slots__ = ("_has_begun", "_is_chunked", "_protocol", "last")

    def __init__(self, protocol: web.RequestHandler, headers: Mapping[str, str], last: bytes = b"") -> None:
        self._protocol = protocol
        self._is_chunked = headers.get(hdrs.TRANSFER_ENCODING) == "chunked"
        self._has_begun = bool(last)
        self.last = last
        is_events = is_event_stream(headers.get(hdrs.CONTENT_TYPE, ""))
        if is_events and isinstance(protocol, GuardedConnection):
            protocol.probe_stream = self._probe

    def _probe(self) -> bool:
        """A comment, should an event have just ended: it tells a client that has left from one that waits."""
        return self._has_begun and self.last.endswith(b"\n\n") and self.send_now(PROBE_COMMENT)

    def send_now(self, data: bytes, framed: bytes | None = None) -> bool:
        """Send `data` as one chunk; False: nothing was sent, it would wait or fail. `framed`: `data` as a chunk."""
        protocol = self._protocol
        transport = protocol.transport
        if not self._has_begun or protocol._paused or transport is None or transport.is_closing():
            return False
        self.last = data
        if not self._is_chunked:
            transport.write(data)
        else:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if framed is None else framed)
        return True


class ClientStream(ChunkSender):
    """The chunks of a response whose head aiohttp has prepared. write() returns something to await only when the
    client reads more slowly than we write. `last`: what went out before."""

    __slots__ = ("_response", "_writer")

    def __init__(self, request: BaseRequest, response: web.StreamResponse, last: bytes = b"") -> None:
        super().__init__(request.protocol, response.headers, last)
        self._writer = request.writer
        self._response = response

    def write(self, data: bytes) -> Awaitable[None] | None:
        """Send `data`, which is not empty, as one chunk. ConnectionError when the client has left."""
        if not self._has_begun:
            self._has_begun, self.last = True, data
            return self._response.write(data)  # aiohttp sends its head along with the first bytes
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        self.last = data
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        return self._writer.drain() if self._protocol.writing_paused else None


class _Clock:
    """The Date header changes once a second."""

    second = -1
    text = ""


def _date() -> str:
    second = int(time.time())
    if second != _Clock.second:
        _Clock.second, _Clock.text = second, formatdate(second, usegmt=True)
    return _Clock.text
