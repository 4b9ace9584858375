"""The floor of the gateway benchmark: what any gateway written on asyncio pays for the sockets alone. Each client's
connection gets one of its own to a worker, and bytes go to and fro as they come; nobody looks at them.

    python -m loadtests.bench.bare_relay --port 9000 --worker http://127.0.0.1:9100
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from typing import cast
from urllib.parse import urlsplit

import uvloop


class _WorkerSide(asyncio.Protocol):
    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.close()


class _ClientSide(asyncio.Protocol):
    """Keeps what the client sends until the worker's connection is there."""

    def __init__(self, worker: tuple[str, int]) -> None:
        self._worker = worker
        self._upstream: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connecting = asyncio.ensure_future(self._connect(cast(asyncio.Transport, transport)))

    async def _connect(self, client: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._upstream, _ = await loop.create_connection(lambda: _WorkerSide(client), *self._worker)
        except OSError:
            client.abort()
            return
        self._upstream.writelines(self._early)
        if client.is_closing():
            self._upstream.close()

    def data_received(self, data: bytes) -> None:
        if self._upstream is None:
            self._early.append(data)
        else:
            self._upstream.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._upstream is not None:
            self._upstream.close()


async def _serve(port: int, workers: list[tuple[str, int]]) -> None:
    turn = itertools.cycle(workers)
    server = await asyncio.get_running_loop().create_server(lambda: _ClientSide(next(turn)), "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.bare_relay",
                                     description="Bytes to and fro, unread.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker", action="append", required=True, help="where to connect to, in turn")
    arguments = parser.parse_args()
    workers = [(url.hostname or "127.0.0.1", url.port or 80) for url in map(urlsplit, arguments.worker)]
    uvloop.run(_serve(arguments.port, workers))


if __name__ == "__main__":
    main()
