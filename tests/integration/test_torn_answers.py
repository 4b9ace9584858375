"""A handler that fails when its answer has begun: the client sees a torn answer, never a second one inside it."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.web_request import BaseRequest

from gateway.server.http import Routes
from gateway.server.raw_response import BegunStream, EventStream
from worker.protocol.api_error import invalid_request

ASK = b"GET /%b HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n"
BEGINNING = b"data: 1\n\n"


async def begun_by_aiohttp(request: BaseRequest) -> web.StreamResponse:
    response = EventStream(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(BEGINNING)
    raise RuntimeError("a defect")


async def begun_past_aiohttp(request: BaseRequest) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n" + BEGINNING + b"\r\n")
    BegunStream(request)
    raise invalid_request("A refusal that comes too late.", None)


async def with_its_head_made(request: BaseRequest) -> web.StreamResponse:
    response = EventStream(headers={"Content-Type": "text/event-stream"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    raise RuntimeError("a defect, and the framing is settled")


async def not_begun(request: BaseRequest) -> web.StreamResponse:
    raise RuntimeError("a defect, before the first byte")


async def said_by(path: bytes) -> bytes:
    """All that a client gets."""
    routes = Routes()
    for handler in (begun_by_aiohttp, begun_past_aiohttp, with_its_head_made, not_begun):
        routes.add("GET", f"/{handler.__name__}", handler)
    runner = web.ServerRunner(web.Server(routes, access_log=None))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(ASK % path)
        async with asyncio.timeout(10):
            found = b""
            try:
                while more := await reader.read(65536):
                    found += more
            except ConnectionResetError:
                pass
        writer.close()
        return found
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("path", [b"begun_by_aiohttp", b"begun_past_aiohttp", b"with_its_head_made"])
async def test_nothing_follows_what_has_begun(path: bytes) -> None:
    said = await said_by(path)
    assert said.count(b"HTTP/1.1") <= 1  # none, where the reset overtook what was sent
    assert b"error" not in said
    assert not said.endswith(b"0\r\n\r\n"), "torn, and to be seen as such"


async def test_a_defect_before_the_first_byte_is_a_500() -> None:
    said = await said_by(b"not_begun")
    assert said.startswith(b"HTTP/1.1 500 ")
    assert b"internal_error" in said
