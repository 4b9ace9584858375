"""What a client sees on the wire, byte for byte: HTTP versions, kept connections, slow readers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest
from aiohttp import web

from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.stub_worker import Seen, StubWorker, events_of, open_stream, refuse, running

WAIT_S = 20.0


@asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[tuple[StubWorker, GatewayUnderTest]]:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url, **settings) as gateway:
        await gateway.until_exact()
        yield stub, gateway


def request(*, stream: bool = False, version: str = "1.1", headers: str = "") -> bytes:
    body = orjson.dumps({"model": "stub", "stream": stream, "messages": [{"role": "user", "content": "hi"}]})
    return (f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\n{headers}"
            f"Content-Length: {len(body)}\r\n\r\n").encode() + body


async def whole_answer(reader: asyncio.StreamReader) -> tuple[list[str], bytes]:
    """Head lines and body of an answer with a Content-Length."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")[:-2]
    length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
    return lines, await reader.readexactly(length)


async def test_a_kept_connection_carries_one_answer_after_the_other() -> None:
    async with serving() as (_, gateway):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.port)
        for _ in range(2):
            writer.write(request() * 3)  # pipelined
            for _ in range(3):
                lines, body = await whole_answer(reader)
                assert lines[0] == "http/1.1 200 ok"
                assert orjson.loads(body)["choices"][0]["message"]["content"] == "Hello world"
                names = [line.split(":")[0] for line in lines[1:]]
                assert len(set(names)) == len(names)
                assert {"content-type", "content-length", "date", "x-request-id", "x-headstart-worker"} <= set(names)
                assert "connection" not in names
        writer.close()


@pytest.mark.parametrize(("version", "asks", "says", "is_kept"), [
    ("1.1", "Connection: close\r\n", "connection: close", False), ("1.0", "", "connection: close", False),
    ("1.0", "Connection: keep-alive\r\n", "connection: keep-alive", True),
])
async def test_who_wants_the_connection_closed_gets_it_closed(version: str, asks: str, says: str,
                                                              is_kept: bool) -> None:
    async with serving() as (_, gateway):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.port)
        writer.write(request(version=version, headers=asks))
        lines, _ = await whole_answer(reader)
        assert says in lines
        if is_kept:
            writer.write(request(version=version, headers=asks))
            assert (await whole_answer(reader))[0][0].endswith("200 ok")
        else:
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()


async def test_a_refusal_of_the_workers_passes_with_its_status() -> None:
    async with serving() as (stub, gateway):
        stub.next_behaviours.append(refuse(422, "odd"))
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.port)
        writer.write(request())
        lines, body = await whole_answer(reader)
        assert lines[0].startswith("http/1.1 422 ")
        assert orjson.loads(body)["error"]["code"] == "odd"
        writer.close()


async def test_a_stream_is_chunked_for_1_1_and_bare_for_1_0() -> None:
    async with serving() as (_, gateway):
        for version, ending in (("1.1", b"data: [DONE]\n\n\r\n0\r\n\r\n"), ("1.0", b"data: [DONE]\n\n")):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.port)
            writer.write(request(stream=True, version=version, headers="Connection: close\r\n"))
            answer = await asyncio.wait_for(reader.read(), WAIT_S)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert (b"Transfer-Encoding: chunked" in head) is (version == "1.1")
            assert body.endswith(ending)
            assert body.startswith(b"data:") is (version == "1.0")
            writer.close()


async def large_stream(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
    response = await open_stream(request, {})
    for _ in range(256):
        await response.write(b": " + b"x" * 65_536 + b"\n\n")
    for event in events_of(seen):
        await response.write(event)
    await response.write_eof()
    return response


async def test_a_slow_reader_gets_everything_in_the_end() -> None:
    async with serving() as (stub, gateway):
        stub.next_behaviours.append(large_stream)
        with narrow_socket(gateway) as client:
            reader, writer = await asyncio.open_connection(sock=client, limit=65_536)
            writer.write(request(stream=True, headers="Connection: close\r\n"))
            await asyncio.sleep(0.3)
            num_bytes, tail = 0, b""
            while data := await asyncio.wait_for(reader.read(262_144), WAIT_S):
                num_bytes, tail = num_bytes + len(data), (tail + data)[-64:]
            assert num_bytes > 256 * 65_536
            assert tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            writer.close()


async def test_a_reader_that_has_stopped_is_let_go() -> None:
    async with serving(chunk_gap_timeout_s=0.3) as (stub, gateway):
        stub.next_behaviours.append(large_stream)
        with narrow_socket(gateway) as client:
            await asyncio.get_running_loop().sock_sendall(client, request(stream=True))
            await gateway.until(lambda: _asked(stub), "the worker has the request")
            await asyncio.wait_for(stub.seen[0].left_early.wait(), WAIT_S)
            assert await gateway.metric("headstart_client_disconnects_total") == 1


async def _asked(stub: StubWorker) -> bool:
    return bool(stub.seen)


def narrow_socket(gateway: GatewayUnderTest) -> socket.socket:
    """A connection whose kernel buffers hold little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    client.connect(("127.0.0.1", gateway.gateway.port))
    client.setblocking(False)
    return client
