"""The near end of the gateway benchmarks: keeps connections busy, closed loop, and checks every answer's framing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast

STREAM_END = b"0\r\n\r\n"


@dataclass(frozen=True)
class Load:
    """Every body once, over `num_connections`; with `spread_s` the connections begin that far apart in all.

    `key` is sent as a bearer token. `pause_s` lies between an answer and the next request of its connection.
    """

    port: int
    bodies: list[bytes]
    num_connections: int
    spread_s: float = 0.0
    pause_s: float = 0.0
    key: str = ""


class _Client(asyncio.Protocol):
    """One connection: the next request when the last answer is whole."""

    def __init__(self, load: Load, left: list[bytes], latencies: list[float], ended: asyncio.Future[None]) -> None:
        self._load = load
        self._left = left  # the bodies yet to be sent, shared by all connections
        self._latencies = latencies
        self._ended = ended
        self._buffer = b""
        self._head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {load.key}\r\n"
                      "Content-Type: application/json\r\nContent-Length: ").encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def connection_lost(self, reason: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(ConnectionError(f"an answer broke off: {reason}"))

    def _send(self) -> None:
        if not self._left:
            self._ended.set_result(None)
            self._transport.close()
            return
        body = self._left.pop()
        self._began_at = time.perf_counter()
        self._transport.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        if not is_whole(self._buffer):
            return
        assert self._buffer.startswith(b"HTTP/1.1 200"), self._buffer[:300]
        self._latencies.append(time.perf_counter() - self._began_at)
        self._buffer = b""
        if self._load.pause_s:
            asyncio.get_running_loop().call_later(self._load.pause_s, self._send)
        else:
            self._send()


def is_whole(answer: bytes) -> bool:
    """Whether an HTTP answer has come to its end, by its length or its last chunk."""
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
    left, latencies = load.bodies[::-1], list[float]()
    ends: list[asyncio.Future[None]] = []
    for _ in range(load.num_connections):
        ended = loop.create_future()
        ends.append(ended)
        await loop.create_connection(lambda ended=ended: _Client(load, left, latencies, ended),  # type: ignore[misc]
                                     "127.0.0.1", load.port)
        if load.spread_s:
            await asyncio.sleep(load.spread_s / load.num_connections)
    await asyncio.gather(*ends)
    assert len(latencies) == len(load.bodies)
    return latencies
