"""The way to a worker: one request out, one response back, bytes untouched.

Owns: pooled connections and what can go wrong on them, named.
Must never: retry, interpret a body, or follow a redirect.
The interface is as narrow as the relay needs, so that the client behind it can be replaced.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Protocol

import aiohttp

MAX_CONNECTIONS = 4096
IDLE_CONNECTION_S = 15.0
READ_BUFFER_BYTES = 64 * 1024


class FailureKind(Enum):
    """Where on the way a worker was lost."""

    CONNECT = "connect"
    RESET = "reset"
    TIMEOUT = "timeout"


class UpstreamFailure(Exception):
    """The worker could not be reached, or went away. `detail` is for the log and the operator."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """One request to a worker. `ssl_context` is for https workers with a CA of their own; None verifies as usual."""

    url: str
    headers: Mapping[str, str]
    body: bytes
    ssl_context: ssl.SSLContext | None = None


class UpstreamResponse(Protocol):
    """Status and headers (names in lower case), then chunks."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The response headers."""
        ...

    @property
    def connect_s(self) -> float:
        """Seconds spent on getting a connection; next to nothing for a pooled one."""
        ...

    async def read_chunk(self) -> bytes:
        """What has arrived, b"" at a proper end; UpstreamFailure(RESET) at any other. Cancelling it loses nothing."""
        ...

    def close(self) -> None:
        """Done: a response read to its end gives its connection back, any other is cut at once (workers abort)."""
        ...


class Upstream(Protocol):
    """Opens requests."""

    async def open(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send the request and await the response head, or raise UpstreamFailure."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


class PooledUpstream:
    """Upstream over one aiohttp session. Create it inside a running loop."""

    def __init__(self, *, connect_timeout_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=IDLE_CONNECTION_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            auto_decompress=False, read_bufsize=READ_BUFFER_BYTES, cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding"), trace_configs=[_connect_trace()])

    async def open(self, request: UpstreamRequest) -> UpstreamResponse:
        """See Upstream."""
        tls: ssl.SSLContext | bool = request.ssl_context or True
        watch = _ConnectWatch()
        try:
            response = await self._session.post(request.url, data=request.body, headers=request.headers, ssl=tls,
                                                allow_redirects=False, trace_request_ctx=watch)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as failure:
            raise UpstreamFailure(FailureKind.CONNECT, str(failure)) from failure
        except (aiohttp.ClientError, OSError) as failure:
            raise UpstreamFailure(FailureKind.RESET, _describe(failure)) from failure
        return _PooledResponse(response, watch.seconds)

    async def close(self) -> None:
        """See Upstream."""
        await self._session.close()


class _PooledResponse:
    def __init__(self, response: aiohttp.ClientResponse, connect_s: float) -> None:
        self._response = response
        self.connect_s = connect_s
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}

    async def read_chunk(self) -> bytes:
        try:
            return await self._response.content.readany()
        except asyncio.CancelledError:
            raise
        except (aiohttp.ClientError, OSError) as failure:
            raise UpstreamFailure(FailureKind.RESET, _describe(failure)) from failure

    def close(self) -> None:
        # aiohttp hands a response's connection back by itself once its last byte is read; close() then does nothing.
        self._response.close()


class _ConnectWatch:
    """Times the making of one connection; 0 when the pool had one."""

    def __init__(self) -> None:
        self.began_at = 0.0
        self.seconds = 0.0


def _connect_trace() -> aiohttp.TraceConfig:
    async def began(_: object, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.began_at = time.perf_counter()

    async def ended(_: object, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.seconds = time.perf_counter() - context.trace_request_ctx.began_at

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_start.append(began)
    trace.on_connection_create_end.append(ended)
    return trace


def _describe(failure: Exception) -> str:
    return str(failure) or type(failure).__name__
