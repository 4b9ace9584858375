"""Upstream over pooled HTTP/1.1 connections of our own: kept alive per worker, the most recently used first.

Owns: which connections are open and idle, how many of each, and for how long.
Must never: send a request twice, but for one case: a kept connection that the worker closed before answering with a
single byte. Whether the worker had closed it while it lay idle cannot be told from here; a fresh one decides.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from gateway.relay.connection import Connection, Exchange
from gateway.relay.http_head import head_bytes
from gateway.relay.upstream import FailureKind, UpstreamFailure, UpstreamRequest, UpstreamResponse

MAX_CONNECTIONS = 4096
MAX_IDLE_PER_WORKER = 256
IDLE_CONNECTION_S = 15.0
MAX_TARGETS = 4096  # distinct URLs remembered in their parsed form
_PORTS = {"http": 80, "https": 443}
# Who names no coding accepts any (RFC 9110, 12.5.3).
_UNCODED = "\r\nAccept-Encoding: identity"
_PATH_SAFE = "/%:@!$&'()*+,;=~"


class Origin(NamedTuple):
    """Where connections lead, and with what trust: those of one origin may stand in for each other."""

    host: str
    port: int
    tls: ssl.SSLContext | None


class PooledUpstream:
    """Upstream. Create it inside a running loop."""

    def __init__(self, *, connect_timeout_s: float, idle_s: float = IDLE_CONNECTION_S,
                 max_connections: int = MAX_CONNECTIONS, max_idle_per_worker: int = MAX_IDLE_PER_WORKER) -> None:
        self._loop = asyncio.get_running_loop()
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._max_connections = max_connections
        self._max_idle_per_worker = max_idle_per_worker
        self._idle: dict[Origin, list[Connection]] = {}  # the last is the most recently used
        self._open: dict[Connection, Origin] = {}
        self._num_connecting = 0
        self._targets: dict[tuple[str, str, ssl.SSLContext | None], tuple[Origin, str]] = {}
        self._usual_trust: ssl.SSLContext | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Connections now open, idle ones included."""
        return len(self._open)

    @property
    def num_idle(self) -> int:
        """Connections waiting for a request."""
        return sum(map(len, self._idle.values()))

    async def open(self, request: UpstreamRequest) -> UpstreamResponse:
        """See Upstream."""
        return await self.follow(self.send_at_once(request), request)

    def send_at_once(self, request: UpstreamRequest) -> Exchange | None:
        """The request on its way over a kept connection; None when there is none. For follow(), sooner or later."""
        origin, beginning = self._target(request)
        connection = self._take_idle(origin)
        if connection is None:
            return None
        return connection.send(_request_head(beginning, request), request.body, is_head=request.method == "HEAD")

    async def follow(self, exchange: Exchange | None, request: UpstreamRequest) -> UpstreamResponse:
        """The rest of open() after send_at_once()."""
        if exchange is not None:
            try:
                return await _answered(exchange)
            except UpstreamFailure:
                if exchange.got_bytes:
                    raise
        origin, beginning = self._target(request)
        head = _request_head(beginning, request)
        began_at = time.perf_counter()
        connection = await self._connect(origin)
        connect_s = time.perf_counter() - began_at
        exchange = connection.send(head, request.body, is_head=request.method == "HEAD")
        exchange.connect_s = connect_s
        return await _answered(exchange)

    async def close(self) -> None:
        """See Upstream."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._open):
            connection.cut()

    # ---- connections ---------------------------------------------------------------------------------------------

    def _take_idle(self, origin: Origin) -> Connection | None:
        waiting = self._idle.get(origin)
        while waiting:
            connection = waiting.pop()
            if connection.is_usable:
                return connection
            connection.cut()
        return None

    async def _connect(self, origin: Origin) -> Connection:
        if self._is_closed:
            raise UpstreamFailure(FailureKind.CONNECT, "the gateway is closing")
        if len(self._open) + self._num_connecting >= self._max_connections:
            raise UpstreamFailure(FailureKind.CONNECT, f"{self._max_connections} connections are open already")
        self._num_connecting += 1
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._loop, freed=self._freed, lost=self._lost), origin.host, origin.port,
                    ssl=origin.tls, server_hostname=origin.host if origin.tls is not None else None)
        except TimeoutError as late:
            raise UpstreamFailure(FailureKind.CONNECT, str(late) or
                                  f"no connection within {self._connect_timeout_s:g} s") from late
        except (OSError, UnicodeError) as failure:  # ssl.SSLError is an OSError; UnicodeError: no name of a host
            raise UpstreamFailure(FailureKind.CONNECT, str(failure) or type(failure).__name__) from failure
        finally:
            self._num_connecting -= 1
        self._open[connection] = origin
        if self._is_closed or not connection.is_usable:
            connection.cut()
            self._open.pop(connection, None)
            raise UpstreamFailure(FailureKind.CONNECT, "closed as soon as it was open")
        return connection

    def _freed(self, connection: Connection) -> None:
        origin = self._open[connection]
        waiting = self._idle.setdefault(origin, [])
        if len(waiting) >= self._max_idle_per_worker or self._is_closed:
            connection.cut()
            return
        connection.idle_since = self._loop.time()
        waiting.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._idle_s, self._sweep_idle)

    def _lost(self, connection: Connection) -> None:
        origin = self._open.pop(connection, None)
        if origin is not None and connection in (waiting := self._idle.get(origin, [])):
            waiting.remove(connection)
            if not waiting:
                del self._idle[origin]

    def _sweep_idle(self) -> None:
        """Close what has been idle too long; the oldest of each origin come first."""
        self._sweep = None
        now = self._loop.time()
        for waiting in list(self._idle.values()):
            while waiting and waiting[0].idle_since + self._idle_s <= now:
                waiting.pop(0).cut()
        oldest = min((waiting[0].idle_since for waiting in self._idle.values() if waiting), default=None)
        if oldest is not None:
            self._sweep = self._loop.call_at(max(oldest + self._idle_s, now + self._idle_s / 4), self._sweep_idle)

    def check_invariants(self) -> None:
        """Idle connections are open ones, each once, usable, and within their limit."""
        for origin, waiting in self._idle.items():
            assert len(waiting) == len(set(waiting)) <= self._max_idle_per_worker
            for connection in waiting:
                assert self._open[connection] == origin, "an idle connection of another origin"
                assert connection.is_usable, "an idle connection that cannot be used"
        assert self._num_connecting >= 0
        assert len(self._open) + self._num_connecting <= self._max_connections

    # ---- targets -------------------------------------------------------------------------------------------------

    def _target(self, request: UpstreamRequest) -> tuple[Origin, str]:
        """The origin, and the head's first two lines."""
        key = (request.method, request.url, request.ssl_context)
        target = self._targets.get(key)
        if target is None:
            if len(self._targets) >= MAX_TARGETS:
                self._targets.clear()
            target = self._targets[key] = self._parse_target(*key)
        return target

    def _parse_target(self, method: str, url: str, trust: ssl.SSLContext | None) -> tuple[Origin, str]:
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError(f"not a worker's URL: {url!r}")
        tls = None
        if parts.scheme == "https":
            tls = trust or self._usual_trust or ssl.create_default_context()
            self._usual_trust = self._usual_trust if trust is not None else tls
        path = quote(parts.path or "/", safe=_PATH_SAFE)
        query = f"?{quote(parts.query, safe=_PATH_SAFE + '?')}" if parts.query else ""
        host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
        named = f"[{host}]" if ":" in host else host
        port = parts.port or _PORTS[parts.scheme]
        suffix = "" if port == _PORTS[parts.scheme] else f":{port}"
        return Origin(host, port, tls), f"{method} {path}{query} HTTP/1.1\r\nHost: {named}{suffix}{_UNCODED}"


async def _answered(exchange: Exchange) -> Exchange:
    try:
        await exchange.head_arrived()
    except BaseException:
        exchange.close()
        raise
    return exchange


def _request_head(beginning: str, request: UpstreamRequest) -> bytes:
    if request.body or request.method == "POST":
        beginning = f"{beginning}\r\nContent-Length: {len(request.body)}"
    return head_bytes(beginning, request.headers.items())
