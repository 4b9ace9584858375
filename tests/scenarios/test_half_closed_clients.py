"""Clients that stop sending: those that wait get their answers, those that have left free the worker at once."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest
from aiohttp import web

from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.stub_worker import Seen, StubWorker, answer, events_of, never_answer, open_stream, running

WAIT_S = 20.0
LEFT_WITHIN_S = 5.0  # 100 ms on a machine that has nothing else to do


@asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[tuple[StubWorker, GatewayUnderTest]]:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, **settings) as gateway:
        await gateway.until_exact()
        yield stub, gateway


def request(*, stream: bool = False, version: str = "1.1", cut: int = 0) -> bytes:
    body = orjson.dumps({"model": "stub", "stream": stream, "prompt": "x"})
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body[:len(body) - cut]


async def half_closed(gateway: GatewayUnderTest, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has sent this and shut its sending side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.port)
    writer.write(data)
    writer.write_eof()
    return reader, writer


async def all_of(gateway: GatewayUnderTest, data: bytes) -> bytes:
    reader, writer = await half_closed(gateway, data)
    async with asyncio.timeout(WAIT_S):
        found = await reader.read()
    writer.close()
    return found


async def slow_answer(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
    await asyncio.sleep(0.3)
    return await answer(stub, request, seen)


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
async def test_an_answer_comes_after_the_client_has_said_everything(pause_s: float) -> None:
    async with serving() as (stub, gateway):
        stub.next_behaviours.append(slow_answer if pause_s else answer)
        found = await all_of(gateway, request())
        interim, head, body = found.rpartition(b"HTTP/1.1 200 OK\r\n")[0], *found.split(b"\r\n\r\n")[-2:]
        assert interim in (b"", b"HTTP/1.1 100 Continue\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert orjson.loads(body)["choices"]


async def test_pipelined_requests_are_all_answered_and_then_the_connection_ends() -> None:
    async with serving() as (stub, gateway):
        found = await all_of(gateway, request() * 5 + b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert found.count(b"HTTP/1.1 200 OK") == 6
        assert found.endswith(b'{"status":"ok"}')
        assert len(stub.seen) == 5


async def test_a_stream_goes_on_and_holds_nothing_but_comments_beside_its_events() -> None:
    async def slowly(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await open_stream(request, {})
        for event in events_of(seen):
            for half in (event[:7], event[7:]):  # torn: a comment in between would break it
                await response.write(half)
                await asyncio.sleep(0.03)
        await response.write_eof()
        return response

    async with serving() as (stub, gateway):
        stub.next_behaviours.append(slowly)
        found = await all_of(gateway, request(stream=True))
        head, _, rest = found.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        text = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            text, rest = text + rest[:int(size, 16)], rest[int(size, 16) + 2:]
        events = [event for event in text.split(b"\n\n") if event and not event.startswith(b":")]
        assert [event + b"\n\n" for event in events] == events_of(stub.seen[0])


async def test_a_body_that_ends_too_early_is_said_to() -> None:
    async with serving() as (stub, gateway):
        found = await all_of(gateway, request(cut=3))
        assert found.startswith(b"HTTP/1.1 400 ")
        assert b"invalid_request" in found
        assert not stub.seen


async def test_half_a_head_is_answered_with_nothing() -> None:
    async with serving() as (_, gateway):
        assert await all_of(gateway, request()[:30]) == b""


async def test_an_old_client_gets_what_is_quick_and_no_interim_answer() -> None:
    async with serving() as (_, gateway):
        found = await all_of(gateway, b"GET /livez HTTP/1.0\r\n\r\n")
        assert found.startswith(b"HTTP/1.0 200") or found.startswith(b"HTTP/1.1 200")
        assert b"100 Continue" not in await all_of(gateway, request(version="1.0"))


async def test_an_old_client_that_wants_to_stay_reads_a_stream_to_its_end() -> None:
    async with serving() as (_, gateway):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.port)
        writer.write(request(stream=True, version="1.0").replace(b"Host: x", b"Host: x\r\nConnection: keep-alive"))
        async with asyncio.timeout(WAIT_S):
            head, _, events = (await reader.read()).partition(b"\r\n\r\n")
        assert b"keep-alive" not in head.lower()
        assert events.endswith(b"data: [DONE]\n\n")
        writer.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("how", ["close", "shutdown and close"])
async def test_a_client_that_has_left_frees_the_worker_before_the_first_byte(version: str, how: str) -> None:
    async with serving() as (stub, gateway):
        stub.next_behaviours.append(never_answer)
        client = socket.create_connection(("127.0.0.1", gateway.gateway.port))
        client.sendall(request(version=version))
        await gateway.until(lambda: _asked(stub), "the worker has the request")
        if how != "close":
            client.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.05)
            assert not stub.seen[0].left_early.is_set(), "it may still be waiting"
        client.close()
        began_at = time.monotonic()
        await asyncio.wait_for(stub.seen[0].left_early.wait(), LEFT_WITHIN_S)
        print(f"{version} {how}: {1000 * (time.monotonic() - began_at):.1f} ms")


@pytest.mark.parametrize("how", ["close", "shutdown and close"])
async def test_a_client_that_has_left_frees_the_worker_in_mid_stream(how: str) -> None:
    async def one_event_then_silence(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await open_stream(request, {})
        await response.write(events_of(seen)[0])
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async with serving() as (stub, gateway):
        stub.next_behaviours.append(one_event_then_silence)
        client = socket.create_connection(("127.0.0.1", gateway.gateway.port))
        client.setblocking(False)
        client.sendall(request(stream=True))
        loop = asyncio.get_running_loop()
        while b"\n\n" not in await loop.sock_recv(client, 4096):
            pass
        if how != "close":
            client.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.05)
            assert not stub.seen[0].left_early.is_set()
        client.close()
        await asyncio.wait_for(stub.seen[0].left_early.wait(), LEFT_WITHIN_S)


async def _asked(stub: StubWorker) -> bool:
    return bool(stub.seen)
