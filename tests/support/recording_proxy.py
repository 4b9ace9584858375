"""Stands between a gateway and a worker and keeps every byte that the gateway sent, connection by connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit


class RecordingProxy:
    """Passes everything on in both directions. `sent`: what came from the gateway, one entry a connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = parts.hostname or "", parts.port or 0
        self.sent: list[bytearray] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        record = bytearray()
        self.sent.append(record)
        with contextlib.suppress(OSError):
            up_reader, up_writer = await asyncio.open_connection(*self._target)
            await asyncio.gather(_copy(reader, up_writer, record), _copy(up_reader, writer, None))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray | None) -> None:
    try:
        while data := await reader.read(65536):
            if record is not None:
                record += data
            writer.write(data)
    except OSError:
        pass
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def recording(url: str) -> AsyncIterator[RecordingProxy]:
    proxy = RecordingProxy(url)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
