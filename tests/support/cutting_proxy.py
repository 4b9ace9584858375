"""A TCP proxy in front of a real worker that breaks answers where a test wants it: after any number of bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

READ_BYTES = 64 * 1024
GARBAGE = b"\x00\xff]}nonsense\r\n" * 200


@dataclass
class Cut:
    """After `num_bytes` of an answer (its head included): "abort" resets the connection, "silence" keeps it open,
    "half-close" ends our side of it, "garbage" writes what is no HTTP, "finish" ends the body as if it were whole
    (a little later, where a chunk ends)."""

    num_bytes: int
    how: str = "abort"


@dataclass
class CuttingProxy:
    """`cuts`: what happens to the next generating requests, in order; the others pass whole."""

    worker_url: str
    cuts: list[Cut] = field(default_factory=list)
    port: int = 0
    num_generating: int = 0
    num_cut: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = urlsplit(self.worker_url)
        up_reader, up_writer = await asyncio.open_connection(target.hostname, target.port)
        exchange = _Exchange(self)
        pumps = [asyncio.create_task(_pump(reader, up_writer, exchange.asked)),
                 asyncio.create_task(exchange.answer(up_reader, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for side in (writer, up_writer):
                side.transport.abort()


class _Exchange:
    def __init__(self, proxy: CuttingProxy) -> None:
        self._proxy = proxy
        self._cut: Cut | None = None
        self._num_sent = 0

    def asked(self, data: bytes) -> None:
        """Requests are not pipelined: what begins with a method begins a request."""
        if data.startswith(b"POST /v1/"):
            self._proxy.num_generating += 1
            self._num_sent = 0
            self._cut = self._proxy.cuts.pop(0) if self._proxy.cuts else None

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(READ_BYTES):
            cut = self._cut
            if cut is not None and self._num_sent + len(data) >= cut.num_bytes:
                self._proxy.num_cut += 1
                await self._break(cut, data, writer)
                return
            self._num_sent += len(data)
            writer.write(data)
            await writer.drain()


    async def _break(self, cut: Cut, data: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data if cut.how == "finish" else data[:cut.num_bytes - self._num_sent])
        if cut.how == "garbage":
            writer.write(GARBAGE)
        if cut.how == "finish":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        if cut.how == "half-close":
            writer.write_eof()
        if cut.how != "abort":
            await asyncio.Event().wait()
        await asyncio.sleep(0.005)  # what was written is to arrive before the reset


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: object) -> None:
    assert callable(seen)
    while data := await reader.read(READ_BYTES):
        seen(data)
        writer.write(data)
        await writer.drain()


@contextlib.asynccontextmanager
async def cutting_proxies(*worker_urls: str) -> AsyncIterator[list[CuttingProxy]]:
    """One in front of each worker."""
    proxies = [CuttingProxy(url) for url in worker_urls]
    async with contextlib.AsyncExitStack() as stack:
        for proxy in proxies:
            server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
            stack.push_async_callback(_close, server)
            proxy.port = server.sockets[0].getsockname()[1]
        yield proxies


async def _close(server: asyncio.Server) -> None:
    server.close()
