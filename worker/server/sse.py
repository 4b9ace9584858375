"""Server-sent events: bytes of one event, and the response they are written to.

Owns the framing and the headers of a stream. Never decides what is in an event, and never ends a stream with
`data: [DONE]` unless told that it is complete: a stream without it is an error to the client (contract section 3).
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11

from worker.protocol.http_mistakes import SERVER

DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx and its relatives would otherwise gather the tokens into buffers.
    "X-Accel-Buffering": "no",
}


def event(payload: object) -> bytes:
    """One `data:` event. orjson never emits a newline, so one line is always enough."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


async def open_stream(request: web.Request, headers: Mapping[str, str]) -> web.StreamResponse:
    """Send the status line and headers of a stream; from here on errors can only be events."""
    return await open_unmeasured(request, {**_STREAM_HEADERS, **headers})


async def open_unmeasured(request: web.Request, headers: Mapping[str, str]) -> web.StreamResponse:
    """The head of a response whose length nobody knows: framed by chunks, or by the end of the connection where the
    client's HTTP does not know those (aiohttp forgets that, where such a client wants to stay)."""
    response = web.StreamResponse(headers={hdrs.SERVER: SERVER, **headers})
    if request.version < HttpVersion11:
        response.force_close()
    await response.prepare(request)
    return response
