"""Streams of a stub worker that are said to their end, and whose connection is not."""

from __future__ import annotations

import asyncio
import gzip

from aiohttp import web

from tests.support.stub_worker import Behaviour, Seen, StubWorker, events_of, open_stream
from worker.protocol.internal_request import TOKEN_IDS_HEADER, TOKEN_IDS_IN_COMMENTS
from worker.protocol.told_tokens import encode_told


def said_all(*, told: bool, hangs: bool = False) -> Behaviour:
    """A whole stream whose connection closes, or hangs, before HTTP's own end of it."""

    async def behave(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await open_stream(request, {TOKEN_IDS_HEADER: TOKEN_IDS_IN_COMMENTS} if told else {})
        for number, event in enumerate(events_of(seen)):
            await response.write((encode_told(0, 1, [number]) if told else b"") + event)
            await asyncio.sleep(0.02)
        if hangs:
            await asyncio.Event().wait()
        assert request.transport is not None
        request.transport.close()
        raise ConnectionResetError("died")

    return behave


def said_in_code(*, stream: bool) -> Behaviour:
    """A whole answer, compressed for somebody who was told that nothing is decoded here."""

    async def behave(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        assert request.headers.getall("Accept-Encoding") == ["identity"]
        said = b"".join(events_of(seen)) if stream else b'{"choices": []}'
        return web.Response(body=gzip.compress(said), headers={
            "Content-Encoding": "gzip", "Content-Type": "text/event-stream" if stream else "application/json"})

    return behave


async def end_without_done_in_capitals(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
    """A stream that names its media type in another case, and ends without [DONE]."""
    response = await open_stream(request, {"Content-Type": "Text/Event-Stream; charset=utf-8"})
    await response.write(events_of(seen)[0])
    await response.write_eof()
    return response
