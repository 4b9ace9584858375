"""A server on a raw socket that says exactly what its script says, byte for byte and cut for cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def sized(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    """A whole response with a Content-Length."""
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n%b\r\n%b" % (status, len(body), more, body)


@dataclass
class Peer:
    """The server's end of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    requests: list[bytes] = field(default_factory=list)
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)  # the client closed or reset it

    async def request(self) -> bytes:
        """Head and body of the next request; IncompleteReadError when the client has closed."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        body = await self.reader.readexactly(content_length(head))
        self.requests.append(head + body)
        return head + body

    async def send(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        """Each piece in a write of its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(pause_s)

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.writer.transport.abort()

    async def until_gone(self) -> None:
        """Await the client's end of the connection, throwing away what it sends."""
        with contextlib.suppress(OSError):
            while await self.reader.read(65536):
                pass
        self.is_gone.set()


Script = Callable[[Peer], Awaitable[None]]


def content_length(head: bytes) -> int:
    """What the request says of its body; 0 without a word."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0


class ScriptedServer:
    """The n-th connection plays the n-th script; connections after the last play that one again."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = scripts
        self.peers: list[Peer] = []
        self.problems: list[BaseException] = []
        self.port = 0
        self.scheme = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/v1/chat/completions"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self.peers.append(peer)
        try:
            await self.scripts[min(len(self.peers), len(self.scripts)) - 1](peer)
        except (OSError, asyncio.IncompleteReadError):
            peer.is_gone.set()
        except Exception as problem:
            self.problems.append(problem)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def scripted(*scripts: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedServer]:
    """The server, listening; a script's own mistake fails the test at the end."""
    played = ScriptedServer(*scripts)
    server = await asyncio.start_server(played.serve, "127.0.0.1", 0, ssl=tls, limit=1 << 20)
    played.port = server.sockets[0].getsockname()[1]
    played.scheme = "http" if tls is None else "https"
    try:
        yield played
    finally:
        server.close()
        for peer in played.peers:
            peer.writer.transport.abort()
    assert not played.problems, played.problems
