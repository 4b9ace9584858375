"""Hostile and broken clients over raw sockets: limits with names, answers that repeat nothing, nothing forwarded."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from aiohttp import web

from gateway.server.connections import MAX_HEADERS
from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.gateway_in_thread import serving_in_thread
from tests.support.stub_worker import Seen, StubWorker, running

NOWHERE = "http://127.0.0.1:1"
SECRET = "hs-a-secret-that-nobody-may-repeat"


async def opened(gateway: GatewayUnderTest) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", gateway.gateway.port)


async def said(gateway: GatewayUnderTest, data: bytes) -> bytes:
    """Everything that the gateway answers to these bytes, until it closes."""
    reader, writer = await opened(gateway)
    writer.write(data)
    async with asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


@pytest.mark.parametrize("head", [
    b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + SECRET.encode() + b"a" * 9000 + b"\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + SECRET.encode() + b"\x00\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"".join(b"h%d: x\r\n" % n for n in range(MAX_HEADERS + 10)) + b"\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\nno colon " + SECRET.encode() + b"\r\n\r\n",
    b"GET /livez HTTP/9.9\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
], ids=["url", "header", "nul", "headers", "colon", "version", "tls", "te+cl", "cl+cl", "cl-"])
async def test_a_malformed_head_is_refused_and_nothing_of_it_repeated(
        head: bytes, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture) -> None:
    is_large = request.node.callspec.id in ("url", "header", "headers")
    async with running_gateway(NOWHERE) as gateway:
        answer = await said(gateway, head)
        assert answer[:13] in ((b"HTTP/1.1 431 ",) if is_large else (b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
        assert (b'"code":"head_too_large"' if is_large else b'"code":"invalid_request"') in answer
        assert SECRET.encode() not in answer
        assert (await gateway.send("GET", "/livez")).status == 200
    out, err = capsys.readouterr()
    assert SECRET not in out + err + caplog.text
    assert "Traceback" not in out + err + caplog.text


@pytest.mark.parametrize("first", [b"", b"GET /livez HTTP/1.1\r\nHost: x\r\n"], ids=["silent", "half a head"])
async def test_a_slow_head_is_cut_at_its_limit(first: bytes) -> None:
    async with running_gateway(NOWHERE, head_timeout_s=0.3) as gateway:
        reader, writer = await opened(gateway)
        writer.write(first)

        async def drip() -> None:
            while first:
                writer.write(b"x: y\r\n")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):
                assert not await reader.read(100), "nothing is said to it"
        dripping.cancel()
        assert await gateway.metric('headstart_rejected_total{reason="slow_head"}') == 1


async def test_a_connection_that_is_kept_alive_may_rest_but_not_dawdle() -> None:
    async with running_gateway(NOWHERE, head_timeout_s=0.3) as gateway:
        reader, writer = await opened(gateway)
        request = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
        for rest_s in (0.0, 0.6):
            await asyncio.sleep(rest_s)
            writer.write(request)
            assert b"200" in await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(b'{"status":"ok"}'))
        writer.write(request[:10])
        async with asyncio.timeout(20):
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)


async def test_one_connection_too_many_is_told_so_and_the_others_are_served() -> None:
    async with running_gateway(NOWHERE, max_connections=3) as gateway:
        held = [await opened(gateway) for _ in range(3)]
        refused = await said(gateway, b"")
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"Too many connections" in refused
        head, body = refused.split(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        held[0][1].close()

        async def served() -> bool:
            return b"200 OK" in await said(gateway, b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

        await gateway.until(served, "a place is free again")
        for _, writer in held:
            writer.close()


def test_one_connection_too_many_on_the_loop_that_serves_in_life() -> None:
    """uvloop's transports are none of asyncio's classes."""
    with serving_in_thread(max_connections=8) as (_, gateway), contextlib.ExitStack() as held:
        clients = [held.enter_context(socket.create_connection(("127.0.0.1", gateway.gateway.port), timeout=20))
                   for _ in range(9)]
        assert clients[-1].recv(100).startswith(b"HTTP/1.1 503 ")


async def test_a_client_that_does_not_read_its_answer_is_cut() -> None:
    async def large(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.Response(body=b"x" * 6_000_000, content_type="application/json")

    stub = StubWorker(worker_token=WORKER_TOKEN)
    stub.next_behaviours.append(large)
    async with running(stub), running_gateway(stub.url, chunk_gap_timeout_s=0.3) as gateway:
        await gateway.until_exact()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", gateway.gateway.port))
        body = b'{"model":"stub","prompt":"x"}'
        await loop.sock_sendall(client, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" %
                                len(body) + body)

        async def cut() -> bool:
            return await gateway.metric('headstart_rejected_total{reason="slow_reader"}') == 1

        await gateway.until(cut, "the reader that does not read is cut")
        client.close()


async def test_nothing_is_sent_outside_the_configured_workers() -> None:
    """No target, header or redirect makes the gateway speak to anybody else."""
    asked: list[str] = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append("connection")
        writer.close()

    async def redirect(stub: StubWorker, request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": url + "/v1/completions"}, text="go there")

    other = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
    stub = StubWorker(worker_token=WORKER_TOKEN)
    async with other, running(stub), running_gateway(stub.url, max_retries=0) as gateway:
        await gateway.until_exact()
        body = b'{"model":"stub","prompt":"x"}'
        names = ["Host", "X-Forwarded-Host", "Forwarded", "x-gateway-destination-endpoint", "x-headstart-worker",
                 "X-Original-URL", "X-Rewrite-URL", "Proxy"]
        for target in ("/v1/completions", url + "/v1/completions", "//" + url[7:] + "/v1/completions"):
            headers = "".join(f"{name}: {url if name != 'Forwarded' else 'host=' + url[7:]}\r\n" for name in names)
            answer = await said(gateway, f"POST {target} HTTP/1.1\r\n{headers}Connection: close\r\n"
                                         f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert answer.split()[1] in (b"200", b"400", b"404"), target
        for seen in stub.seen:
            assert not {name.lower() for name in names[1:]} & set(seen.headers)
        stub.next_behaviours.append(redirect)
        redirected = await gateway.send("POST", "/v1/completions", body=body)
        assert (redirected.status, redirected.error["code"]) == (502, "worker_failed")
        image = {"type": "image_url", "image_url": {"url": url + "/x.png"}}
        await gateway.send("POST", "/v1/chat/completions", payload={
            "model": "stub", "messages": [{"role": "user", "content": [image]}]})
        reader, writer = await opened(gateway)
        writer.write(f"CONNECT {url[7:]} HTTP/1.1\r\nHost: {url[7:]}\r\n\r\n".encode())
        assert b" 200 " not in await reader.readline()
        writer.close()
    assert asked == []


async def test_only_a_trusted_proxy_may_say_who_the_client_is(capsys: pytest.CaptureFixture[str]) -> None:
    said_by_all = {"X-Forwarded-For": "192.0.2.7"}
    for trusted, client in (((), "127.0.0.1"), (("127.0.0.0/8",), "192.0.2.7")):
        async with running_gateway(NOWHERE, trusted_proxies=trusted) as gateway:
            await gateway.send("POST", "/v1/completions", body=b"{", headers=said_by_all)
        out, err = capsys.readouterr()
        assert f"client={client} " in out + err
