"""A client's connection with an express lane beside aiohttp's way.

Owns: where on the connection the next head begins, as long as that is certain, and which request is in the express
lane: one at most, and nothing of aiohttp's beside it. Must never: take the lane for bytes that might be in the middle
of something: whoever pipelines, sends in chunks or breaks HTTP stays on aiohttp's way for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_request import BaseRequest

from gateway.server.arrival import Arrivals
from gateway.server.connections import KEEPALIVE_TIMEOUT_S, ConnectionLimits, GuardedConnection, GuardedServer
from gateway.server.express import Express, Passenger
from gateway.server.http import Routes
from gateway.server.known_heads import Cut
from gateway.server.raw_response import CHUNKED_EVENTS, LAST_CHUNK, ChunkSender, stream_beginning, whole_head

# A body that takes longer to arrive is aiohttp's to wait for.
COLLECT_S = 1.0


class ExpressConnection(GuardedConnection):
    """See GuardedConnection. `_body_due`: bytes until the next head begins; None when that is not known any more."""

    __slots__ = ("_arrivals", "_body_due", "_collected", "_collected_due", "_express", "_passenger",
                 "begun")

    def __init__(self, server: GuardedServer, express: Express, arrivals: Arrivals, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._express = express
        self._arrivals = arrivals
        self._passenger: Passenger | None = None
        self._body_due: int | None = 0
        self._collected: list[bytes] = []
        self._collected_due = 0
        self.begun: Passenger | None = None  # handed over, and not taken by its handler yet

    @property
    def client_address(self) -> str | None:
        """See Client."""
        peer = self.peername
        return str(peer[0]) if isinstance(peer, (list, tuple)) else peer

    # ---- asyncio.Protocol ----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. aiohttp calls it with no data to go on after a pause in reading."""
        if not data:
            super().data_received(data)
        elif self._collected:
            self._collect(data)
        elif self._passenger is not None:
            self._passenger.hand_over()  # it sends more before it has its answer
            self._feed(data)
        elif self._body_due != 0 or not self._board(data):
            self._feed(data)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """See asyncio.Protocol. What a client that sends no more has asked for is aiohttp's to answer."""
        self._leave_lane()
        return super().eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        self._collected.clear()
        for passenger in (self._passenger, self.begun):
            if passenger is not None:
                passenger.client_left()
        self._passenger = self.begun = None
        super().connection_lost(exc)

    async def shutdown(self, timeout: float | None = 15.0) -> None:  # noqa: ASYNC109 (its name is aiohttp's)
        """See RequestHandler."""
        self._leave_lane()
        await super().shutdown(timeout)

    def _process_keepalive(self) -> None:
        if self._passenger is not None:
            self._next_keepalive_close_time = self._loop.time() + KEEPALIVE_TIMEOUT_S
        super()._process_keepalive()

    # ---- the express lane ----------------------------------------------------------------------------------------

    def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """See Client."""
        self._passenger = None
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        closes = self._arrivals.is_closing()
        transport.write(whole_head(status, headers.items(), len(body), "close" if closes else None) + body)
        self._answered(transport, closes=closes)

    def begin_stream(self, headers: Mapping[str, str], data: bytes) -> ChunkSender | None:
        """See Client."""
        transport = self.transport
        if transport is None or transport.is_closing() or self.writing_paused or self._arrivals.is_closing():
            return None
        transport.write(stream_beginning(headers.items(), data))
        return ChunkSender(self, CHUNKED_EVENTS, data)

    def end_stream(self, data: bytes) -> None:
        """See Client. Only once: what follows is another answer's."""
        if self._passenger is None:
            return
        self._passenger = self.probe_stream = None
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.write(data + LAST_CHUNK)
            self._answered(transport, closes=self._arrivals.is_closing())

    def _answered(self, transport: asyncio.Transport, *, closes: bool) -> None:
        self._next_keepalive_close_time = self._loop.time() + KEEPALIVE_TIMEOUT_S
        if closes:
            self.force_close()
        elif transport.get_write_buffer_size():
            self.answered()  # whoever does not read is watched

    def hand_over(self, passenger: Passenger) -> None:
        """See Client. Who has not been let in yet begins anew."""
        self._passenger, self.begun = None, None if passenger.visit is None else passenger
        self._feed(passenger.data)

    def _board(self, data: bytes) -> bool:
        """Whether the express lane has taken `data`, the beginning of a request or all of it."""
        cut = self._arrivals.cut(data)
        facts = None if cut is None else self._arrivals.known(cut)
        if cut is None or facts is None or not self._is_free():
            return False
        missing = cut.end + cut.length - len(data)
        if missing < 0:
            return False
        if missing:
            self._collected, self._collected_due = [data], missing
            self._start(COLLECT_S, self._leave_lane)
            return True
        self._stop()
        self._passenger = passenger = self._express.board(self, facts, data, data[cut.end:])
        self._express.depart(passenger)
        return True

    def _is_free(self) -> bool:
        """Whether aiohttp has answered all it was given, and the connection serves another request as usual."""
        transport = self.transport
        return (self._num_finished == self._request_count and not self._messages
                and transport is not None and not transport.is_closing()
                and not transport.get_write_buffer_size() and not self._close and not self._force_close
                and not self._arrivals.is_closing())

    def _collect(self, data: bytes) -> None:
        self._collected.append(data)
        self._collected_due -= len(data)
        if self._collected_due > 0:
            return
        whole, self._collected = b"".join(self._collected), []
        if self._collected_due or not self._board(whole):
            self._feed(whole)

    def _leave_lane(self) -> None:
        """Whatever is under way in the lane goes on as usual."""
        if self._passenger is not None:
            self._passenger.hand_over()
        elif self._collected:
            whole, self._collected = b"".join(self._collected), []
            self._feed(whole)

    def _feed(self, data: bytes) -> None:
        """Bytes for aiohttp, and an eye on where the next head begins."""
        due, count = self._body_due, self._request_count
        cut = self._arrivals.cut(data) if due == 0 else None
        super().data_received(data)
        if due:
            self._body_due = due - len(data) if len(data) <= due else None
        elif due == 0:
            self._body_due = None
            if self._request_count == count + 1 and self._messages:
                self._body_due = self._began(cut, data, *self._messages[-1])

    def _began(self, cut: Cut | None, data: bytes, message: object, body: Any) -> int | None:
        """aiohttp has read one message from `data`, which began with it: how much of it is still to come."""
        if not isinstance(message, RawRequestMessage) or message.upgrade or message.chunked:
            return None
        if cut is None:
            # Without a length there is no body. Other writings of a length are not worth following.
            is_bare = "Content-Length" not in message.headers and data.endswith(b"\r\n\r\n")
            return 0 if is_bare and data.count(b"\r\n\r\n") == 1 else None
        is_strict = data.count(b"\n", 0, cut.end) == data.count(b"\r\n", 0, cut.end)
        due = cut.end + cut.length - len(data)
        if due < 0 or not is_strict or not data.startswith(b"POST "):
            return None
        if due == 0 and body.is_eof():
            self._arrivals.learn(cut, message)
        return due


class ExpressServer(GuardedServer):
    """GuardedServer whose connections have an express lane."""

    def __init__(self, routes: Routes, express: Express, arrivals: Arrivals, *, limits: ConnectionLimits,
                 on_refused: Callable[[str], None]) -> None:
        super().__init__(routes, limits=limits, on_refused=on_refused)
        self._express = express
        self._arrivals = arrivals

    def __call__(self) -> web.RequestHandler:
        """One connection's protocol."""
        return ExpressConnection(self, self._express, self._arrivals, loop=self._loop, **self._kwargs)


def take_begun(request: BaseRequest) -> Passenger | None:
    """What the express lane has done for this request already; asked once."""
    connection = request.protocol
    if not isinstance(connection, ExpressConnection):
        return None
    begun, connection.begun = connection.begun, None
    return begun
