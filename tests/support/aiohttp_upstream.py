"""Upstream over aiohttp's client: somebody else's reading of HTTP, to hold our own against (tests/conformance)."""

from __future__ import annotations

import asyncio
import ssl

import aiohttp

from gateway.relay.upstream import FailureKind, Takers, UpstreamFailure, UpstreamRequest, UpstreamResponse

READ_BUFFER_BYTES = 64 * 1024


class AiohttpUpstream:
    """Upstream. Create it inside a running loop."""

    def __init__(self, *, connect_timeout_s: float) -> None:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s), auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES, cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"}, skip_auto_headers=("User-Agent",))

    async def open(self, request: UpstreamRequest) -> UpstreamResponse:
        """See Upstream."""
        tls: ssl.SSLContext | bool = request.ssl_context or True
        try:
            response = await self._session.request(request.method, request.url, data=request.body, ssl=tls,
                                                   headers=request.headers, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as failure:
            raise UpstreamFailure(FailureKind.CONNECT, str(failure)) from failure
        except (aiohttp.ClientError, OSError) as failure:
            raise UpstreamFailure(FailureKind.RESET, str(failure)) from failure
        return _Response(response)

    async def close(self) -> None:
        """See Upstream."""
        await self._session.close()


class _Response:
    connect_s = 0.0

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}

    async def read_chunk(self, within_s: float | None = None, takers: Takers | None = None) -> bytes:
        async with asyncio.timeout(within_s):
            try:
                return await self._response.content.readany()
            except (aiohttp.ClientError, ConnectionError) as failure:
                raise UpstreamFailure(FailureKind.RESET, str(failure)) from failure

    def close(self) -> None:
        self._response.close()
