"""The limit of a request's whole head, over raw sockets: in one piece, in many, on both ways through the gateway."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.stub_worker import StubWorker, running
from worker.protocol.http_mistakes import MAX_HEAD_BYTES

WAIT_S = 20.0
NOWHERE = "http://127.0.0.1:1"
BEGIN = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
BODY = b'{"model":"stub","messages":[{"role":"user","content":"hello"}]}'


def head(num_bytes: int, begin: bytes = BEGIN) -> bytes:
    """One of exactly this length, in lines that are each short enough."""
    lines, missing = [begin], num_bytes - len(begin) - 2
    while missing:
        line = missing if missing <= 4_000 else 2_000
        lines.append(b"x: " + b"y" * (line - 5) + b"\r\n")
        missing -= line
    return b"".join([*lines, b"\r\n"])


def chat(num_bytes: int | None = None, body: bytes = BODY) -> bytes:
    """With a head of this length, or a usual one."""
    begin = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    return (begin + b"\r\n" if num_bytes is None else head(num_bytes, begin)) + body


async def answer_to(gateway: GatewayUnderTest, data: bytes, piece_bytes: int, *, pause: bool = False) -> bytes:
    """What the gateway says until it closes. With `pause` it reads every piece by itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.port)
    found = b""
    with contextlib.suppress(ConnectionError):
        for start in range(0, len(data), piece_bytes):
            writer.write(data[start:start + piece_bytes])
            await writer.drain()
            if pause:
                await asyncio.sleep(0.002)
        async with asyncio.timeout(WAIT_S):
            while piece := await reader.read(65_536):
                found += piece
    writer.close()
    return found


@pytest.mark.parametrize("piece_bytes", [1 << 20, 30_000, 999], ids=["whole", "in three", "in many"])
async def test_a_head_of_the_limit_is_served_and_one_byte_more_is_a_431(piece_bytes: int) -> None:
    async with running_gateway(NOWHERE) as gateway:
        served = await answer_to(gateway, head(MAX_HEAD_BYTES), piece_bytes, pause=True)
        assert served.startswith(b"HTTP/1.1 200 ")
        refused = await answer_to(gateway, head(MAX_HEAD_BYTES + 1), piece_bytes, pause=True)
        assert refused.startswith(b"HTTP/1.1 431 ")
        assert b'"type":"invalid_request_error"' in refused
        assert b'"code":"head_too_large"' in refused
        assert b"yyy" not in refused
        assert await gateway.metric('headstart_rejected_total{reason="large_head"}') == 1


async def test_a_head_without_an_end_is_refused_while_it_comes() -> None:
    async with running_gateway(NOWHERE) as gateway:
        refused = await answer_to(gateway, head(MAX_HEAD_BYTES + 30)[:-2], 4_000, pause=True)
        assert refused.startswith(b"HTTP/1.1 431 ")


async def test_a_connection_that_knows_the_express_lane_has_the_same_limit() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        usual = chat()
        for _ in range(2):   # of which the second has a head that is known
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.port)
            writer.write(usual)
            assert b" 200 " in await reader.readuntil(b"\r\n")
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.gateway.port)
        writer.write(usual)
        taken = await reader.readuntil(b"\r\n\r\n")
        [length] = [line for line in taken.lower().split(b"\r\n") if line.startswith(b"content-length: ")]
        await reader.readexactly(int(length.partition(b" ")[2]))
        seen = len(stub.seen)
        writer.write(chat(MAX_HEAD_BYTES + 1))
        async with asyncio.timeout(WAIT_S):
            assert b" 431 " in await reader.readuntil(b"\r\n")
        writer.close()
        assert len(stub.seen) == seen
        assert await gateway.metric('headstart_express_requests_total{outcome="answered"}') >= 1


@pytest.mark.parametrize("piece_bytes", [1 << 20, 10_000])
@pytest.mark.parametrize(("ignored_bytes", "num_behind"), [(3 * MAX_HEAD_BYTES, 2), (10, 4_000)])
async def test_a_body_and_what_is_pipelined_behind_it_count_for_no_head(piece_bytes: int, ignored_bytes: int,
                                                                       num_behind: int) -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        padded = BODY[:-1] + b',"ignored":"' + b"z" * ignored_bytes + b'"}'
        behind = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * num_behind
        answers = await answer_to(gateway, chat(body=padded) + behind + head(1_000), piece_bytes)
        assert answers.count(b"HTTP/1.1 200 ") == num_behind + 2
        assert b"HTTP/1.1 431 " not in answers
