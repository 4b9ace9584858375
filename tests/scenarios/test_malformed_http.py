"""Malformed and ambiguous HTTP: a request is served whole or refused, and what a worker gets can be read in one way.

Every case goes in one piece and in many. What the gateway sent on is kept byte for byte and read by a parser that
knows one form only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import threading
from collections.abc import Iterator

import orjson
import pytest

from tests.support.gateway_in_process import WORKER_TOKEN, GatewayUnderTest, running_gateway
from tests.support.gateway_in_thread import in_thread
from tests.support.malformed_http import BODY, CORPUS, SMUGGLED, Malformed
from tests.support.recording_proxy import RecordingProxy, recording
from tests.support.stub_worker import StubWorker, running

WAIT_S = 20.0
PIECE_BYTES, PIECES_UP_TO_BYTES = 9, 2_000
_HEADER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: [^\r\n\0]*")
_START = re.compile(rb"(GET|POST) (/[\w/]*) HTTP/1\.1")


@pytest.fixture(scope="module")
def played() -> Iterator[tuple[RecordingProxy, GatewayUnderTest]]:
    @contextlib.asynccontextmanager
    async def serving():  # type: ignore[no-untyped-def]
        stub = StubWorker(worker_token=WORKER_TOKEN)
        async with running(stub), recording(stub.url) as proxy, running_gateway(proxy.url) as gateway:
            await gateway.until_exact()
            yield proxy, gateway

    with in_thread(serving) as found:
        yield found


def exchange(port: int, data: bytes, *, in_pieces: bool = False) -> bytes:
    """Send it all, stop sending, and read until the gateway closes."""
    size = len(data) or 1
    if in_pieces:
        size = PIECE_BYTES if len(data) <= PIECES_UP_TO_BYTES else len(data) // 3
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = b""
        with contextlib.suppress(OSError):
            for start in range(0, len(data), size):
                client.sendall(data[start:start + size])
            client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(65536):
                found += piece
        return found


def answers_in(data: bytes) -> list[tuple[int, bytes, bytes]]:
    """Status, head and body of every final answer."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status < 200:
            continue
        body, data = _body(head.lower(), data)
        found.append((status, head, body))
    return found


def _body(head: bytes, data: bytes) -> tuple[bytes, bytes]:
    if b"transfer-encoding: chunked" in head:
        body, _, rest = data.partition(b"0\r\n\r\n")
        return body, rest
    length = re.search(rb"content-length: (\d+)", head)
    if length is None:
        return data, b""
    return data[:int(length[1])], data[int(length[1]):]


def requests_in(data: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """Target, head and body of every request, read by a parser that takes one form and nothing else."""
    found = []
    while data:
        head, end, data = data.partition(b"\r\n\r\n")
        assert end, f"half a head was sent on: {head!r}"
        line, *headers = head.split(b"\r\n")
        start = _START.fullmatch(line)
        assert start, line
        assert all(_HEADER.fullmatch(header) for header in headers), headers
        names = [header.partition(b":")[0].lower() for header in headers]
        assert len(names) == len(set(names)), f"a header came twice: {names}"
        assert b"transfer-encoding" not in names, "what the gateway sends has a length"
        length = next((int(header.partition(b": ")[2]) for header in headers
                       if header.lower().startswith(b"content-length:")), 0)
        assert len(data) >= length
        found.append((start[2], head, data[:length]))
        data = data[length:]
    return found


def forwarded(proxy: RecordingProxy) -> list[tuple[bytes, bytes, bytes]]:
    """Every generating request that a worker has seen so far."""
    return [request for sent in proxy.sent for request in requests_in(bytes(sent)) if request[0].startswith(b"/v1/")]


@pytest.mark.parametrize("header", ["Content-Encoding: gzip", "Expect: 100-continue", "x-request-id: one",
                                    "x-request-deadline-ms: 1000", "x-request-migration: off"])
def test_what_may_come_once_is_refused_twice(header: str, played: tuple[RecordingProxy, GatewayUnderTest]) -> None:
    port, name = played[1].gateway.port, header.partition(":")[0].lower()
    lines = f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{header}\r\n{header.upper()}\r\n\r\n".encode()
    [(status, head, body)] = answers_in(exchange(port, lines))
    error = orjson.loads(body)["error"]
    assert (status, error["code"], error["param"].lower()) == (400, "invalid_request", name)
    assert b"aiohttp" not in head.lower()


def head_and_get_bodies(case: Malformed, name: str, data: bytes) -> bytes:
    """The answer to HEAD has a length and no body: give it one, so that it can be read like the others."""
    return data.replace(b"\r\n\r\n", b"\r\n\r\n" + b"x" * 15, 1) if name.startswith("HEAD") else data


@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("name", CORPUS)
def test_it_is_served_whole_or_refused(name: str, in_pieces: bool, played: tuple[RecordingProxy, GatewayUnderTest],
                                       caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    (proxy, gateway), case = played, CORPUS[name]
    before = len(forwarded(proxy))
    port = gateway.gateway.port
    found = answers_in(head_and_get_bodies(case, name, exchange(port, case.data, in_pieces=in_pieces)))
    statuses = [status for status, _, _ in found]
    assert len(statuses) <= len(case.answers), statuses
    assert all(status in allowed for status, allowed in zip(statuses, case.answers, strict=False)), statuses
    assert statuses or not case.answers, "not a word"
    for status, head, body in found:
        assert SMUGGLED not in head
        assert status < 400 or status == 404 or SMUGGLED not in body, "an answer repeats what was sent"
    new = forwarded(proxy)[before:]
    assert len(new) == sum(b"x-headstart-worker" in head for _, head, _ in found) <= case.num_forwarded
    for target, head, body in new:
        assert target == b"/v1/completions"
        assert SMUGGLED not in head
        assert body.startswith(BODY[:-1])
    text = " ".join(record.getMessage() + str(record.exc_info or "") for record in caplog.records)
    assert "Traceback" not in text
    assert "Unhandled" not in text
    assert answers_in(exchange(port, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"))[0][0] == 200


def test_the_reader_of_what_was_sent_on_bites() -> None:
    fine = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    assert [target for target, _, _ in requests_in(fine * 2)] == [b"/v1/completions"] * 2
    for wrong in (fine[:-1], fine + b"GET", fine.replace(b"/v1/", b"http://x/v1/"), fine.replace(b" x", b" x\0"),
                  fine.replace(b"\r\nHost", b"\nHost"), *(fine.replace(b"Host: x", line) for line in (
                      b"Host : x", b"Content-Length: 2", b"Transfer-Encoding: chunked"))):
        with pytest.raises(AssertionError):
            requests_in(wrong)


def test_many_connections_of_every_kind_at_once_leave_the_gateway_whole(
        played: tuple[RecordingProxy, GatewayUnderTest]) -> None:
    _, gateway = played
    threads = [threading.Thread(target=exchange, args=(gateway.gateway.port, case.data)) for case in CORPUS.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = answers_in(exchange(gateway.gateway.port, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert found[0][0] == 200

    async def idle() -> bool:
        return (await gateway.worker())["inflight"] == 0

    loop = gateway.session._loop
    assert asyncio.run_coroutine_threadsafe(gateway.until(idle, "nothing is under way"), loop).result(WAIT_S)
