"""The near end of the relay benchmark: keeps connections busy, closed loop, and checks every answer's framing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast

STREAM_END = b"\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Load:
    """`num_requests` over `num_connections`; with `spread_s` the connections begin that far apart in all."""

    port: int
    bodies: list[bytes]
    num_requests: int
    num_connections: int
    spread_s: float = 0.0


class _Client(asyncio.Protocol):
    """One connection: the next request when the last answer is whole."""

    def __init__(self, load: Load, numbers: list[int], latencies: list[float], ended: asyncio.Future[None]) -> None:
        self._load = load
        self._numbers = numbers  # of the requests yet to be sent, shared by all connections
        self._latencies = latencies
        self._ended = ended
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def connection_lost(self, reason: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(ConnectionError(f"an answer broke off: {reason}"))

    def _send(self) -> None:
        if not self._numbers:
            self._ended.set_result(None)
            self._transport.close()
            return
        body = self._load.bodies[self._numbers.pop() % len(self._load.bodies)]
        self._began_at = time.perf_counter()
        self._transport.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\n"
                              b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not _is_whole(self._buffer):
            return
        assert self._buffer.startswith(b"HTTP/1.1 200"), self._buffer[:300]
        self._latencies.append(time.perf_counter() - self._began_at)
        self._buffer = b""
        self._send()


def _is_whole(answer: bytes) -> bool:
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = answer[:end].lower()
    at = head.find(b"content-length:")
    if at < 0:
        return answer.endswith(STREAM_END)
    return len(answer) == end + 4 + int(head[at + 15:].split(b"\r\n", 1)[0])


async def run_load(load: Load) -> list[float]:
    """Send it all; the seconds of each request."""
    loop = asyncio.get_running_loop()
    numbers, latencies = list(range(load.num_requests)), list[float]()
    ends: list[asyncio.Future[None]] = []
    for _ in range(load.num_connections):
        ended = loop.create_future()
        ends.append(ended)
        await loop.create_connection(lambda ended=ended: _Client(load, numbers, latencies, ended),  # type: ignore[misc]
                                     "127.0.0.1", load.port)
        if load.spread_s:
            await asyncio.sleep(load.spread_s / load.num_connections)
    await asyncio.gather(*ends)
    assert len(latencies) == load.num_requests
    return latencies
