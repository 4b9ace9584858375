"""A server with one model that says the same bytes to whatever it is asked to generate."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from tests.support.scripted_server import OK, Peer, scripted, sized

MODELS = sized(b'{"data":[{"id":"m"}]}')
NOT_THERE = sized(b"{}", b"404 Not Found")
STREAM = OK + b"Content-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TOKEN = b'data: {"choices":[{"delta":{"content":"a"},"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def canned(raw: bytes | None) -> AsyncIterator[str]:
    """Its address. None: it never says anything to a request that generates."""
    async def play(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if request.startswith(b"GET"):
                await peer.send(MODELS if request.startswith(b"GET /v1/models") else NOT_THERE)
            elif raw is None:
                return await peer.until_gone()
            else:
                return await peer.send(raw)

    async with scripted(play) as server:
        yield f"http://127.0.0.1:{server.port}"
