"""One request out, one response back: what every Upstream does, with good workers and with bad ones."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest

from gateway.relay.upstream import FailureKind, Upstream, UpstreamFailure, UpstreamRequest, UpstreamResponse
from tests.support.scripted_server import CHUNKED, OK, Peer, Script, scripted, sized

SOON_S = 10.0


def post(url: str, body: bytes = b'{"a":1}', **headers: str) -> UpstreamRequest:
    return UpstreamRequest(url, {name.replace("_", "-"): value for name, value in headers.items()}, body)


async def read_all(response: UpstreamResponse) -> bytes:
    body = b""
    try:
        while chunk := await response.read_chunk(SOON_S):
            body += chunk
    finally:
        response.close()
    return body


async def fetch(upstream: Upstream, url: str) -> tuple[int, bytes]:
    response = await upstream.open(post(url))
    return response.status, await read_all(response)


def answers(*pieces: bytes, pause_s: float = 0.0) -> Script:
    """Answer every request with these writes."""

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(*pieces, pause_s=pause_s)

    return script


def once(*pieces: bytes, end: Callable[[Peer], None] | None = None) -> Script:
    """Answer one request, then `end`, by default by closing."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(*pieces)
        if end is not None:
            end(peer)

    return script


def half_close(peer: Peer) -> None:
    peer.writer.write_eof()


async def test_the_request_is_what_was_asked_for(upstream: Upstream) -> None:
    async with scripted(answers(sized(b"hi", more=b"X-Some: thing\r\nx-some: more\r\n"))) as server:
        response = await upstream.open(post(server.url + "?q=a%20b", content_type="application/json", x_y="zé"))
        assert (response.status, response.headers["content-length"]) == (200, "2")
        assert await read_all(response) == b"hi"
        head, _, body = server.peers[0].requests[0].partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        assert first == b"POST /v1/chat/completions?q=a%20b HTTP/1.1"
        assert body == b'{"a":1}'
        lines = [line for line in map(bytes.lower, lines) if not line.startswith(b"accept:")]
        assert sorted(lines) == sorted([b"host: 127.0.0.1:%d" % server.port, b"content-type: application/json",
                                        "x-y: zé".encode(), b"content-length: 7", b"accept-encoding: identity"])


async def test_a_kept_connection_serves_again_and_again(upstream: Upstream) -> None:
    for response in (sized(b"hi"), CHUNKED + b"2\r\nhi\r\n0\r\nx-trailer: 1\r\n\r\n"):
        async with scripted(answers(response)) as server:
            for _ in range(3):
                assert await fetch(upstream, server.url) == (200, b"hi")
            assert len(server.peers) == 1


async def test_at_once_means_connections_of_their_own(upstream: Upstream) -> None:
    async with scripted(answers(OK, b"Content-Length: 2\r\n", b"\r\nh", b"i", pause_s=0.01)) as server:
        for _ in range(2):
            found = await asyncio.gather(*(fetch(upstream, server.url) for _ in range(8)))
            assert found == [(200, b"hi")] * 8
        assert len(server.peers) == 8


async def test_a_large_body_goes_out_whole(upstream: Upstream) -> None:
    body = bytes(range(256)) * 20_000
    async with scripted(answers(sized(b"ok"))) as server:
        response = await upstream.open(post(server.url, body))
        assert await read_all(response) == b"ok"
        assert server.peers[0].requests[0].endswith(body)


WHOLE = [
    ("by length", sized(b"hello"), 200, b"hello"),
    ("empty", sized(b""), 200, b""),
    ("chunked", CHUNKED + b"2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", 200, b"hello"),
    ("chunked, with trailers", CHUNKED + b"5\r\nhello\r\n0\r\na: b\r\nc: d\r\n\r\n", 200, b"hello"),
    ("1xx before it", b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + sized(b"hello"), 200, b"hello"),
    ("204", b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    ("an error's body", sized(b"no", b"400 Bad Request"), 400, b"no"),
    ("a redirect is not followed", sized(b"", b"302 Found", b"Location: http://127.0.0.1:1/\r\n"), 302, b""),
    ("gzip stays as it came", sized(b"\x1f\x8b\x08", more=b"Content-Encoding: gzip\r\n"), 200, b"\x1f\x8b\x08"),
]


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize(("name", "raw", "status", "body"), WHOLE, ids=[case[0] for case in WHOLE])
async def test_whole_responses(upstream: Upstream, name: str, raw: bytes, status: int, body: bytes,
                               in_pieces: bool) -> None:
    pieces = [raw[index:index + 1] for index in range(len(raw))] if in_pieces else [raw]
    async with scripted(answers(*pieces)) as server:
        for _ in range(2):
            assert await fetch(upstream, server.url) == (status, body)
        assert len(server.peers) == 1, "and the connection is kept"


@pytest.mark.parametrize(("name", "raw", "body"), [
    ("HTTP/1.1 until it closes", OK + b"\r\nhello", b"hello"),
    ("HTTP/1.0", b"HTTP/1.0 200 OK\r\n\r\nhello", b"hello"),
    ("told to close", sized(b"hello", more=b"Connection: close\r\n"), b"hello"),
])
async def test_responses_after_which_the_connection_ends(upstream: Upstream, name: str, raw: bytes,
                                                         body: bytes) -> None:
    async with scripted(once(raw)) as server:
        for _ in range(2):
            assert await fetch(upstream, server.url) == (200, body)
        assert len(server.peers) == 2


async def test_half_closed_after_an_answer_is_an_answer(upstream: Upstream) -> None:
    async with scripted(once(sized(b"hello"), end=half_close)) as server:
        for _ in range(2):
            assert await fetch(upstream, server.url) == (200, b"hello")
            await asyncio.sleep(0.05)


BROKEN = [
    ("before any byte", [], b""), ("inside the head", [OK + b"Conte"], b""),
    ("inside a body of known length", [OK + b"Content-Length: 9\r\n\r\nhello"], b"hello"),
    ("inside a chunk", [CHUNKED + b"9\r\nhello"], b"hello"),
    ("between chunks", [CHUNKED + b"5\r\nhello\r\n"], b"hello"),
    ("before the last line", [CHUNKED + b"5\r\nhello\r\n0\r\n"], b"hello"),
]


@pytest.mark.parametrize("end", [Peer.reset, half_close, None], ids=["RST", "half-close", "FIN"])
@pytest.mark.parametrize(("name", "pieces", "body"), BROKEN, ids=[case[0] for case in BROKEN])
async def test_a_connection_that_ends_too_early(upstream: Upstream, name: str, pieces: list[bytes], body: bytes,
                                                end: Callable[[Peer], None] | None) -> None:
    read, is_read = bytearray(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(*pieces)
        if end is Peer.reset and body:
            await is_read.wait()  # a reset may overtake what was sent before it
        if end is not None:
            end(peer)

    async def read_on() -> None:
        response = await upstream.open(post(server.url))
        with contextlib.closing(response):
            while chunk := await response.read_chunk(SOON_S):
                read.extend(chunk)
                if len(read) == len(body):
                    is_read.set()

    async with scripted(script) as server:
        with pytest.raises(UpstreamFailure) as failure:
            await read_on()
        assert failure.value.kind is FailureKind.RESET
        assert failure.value.detail
        assert bytes(read) == body, "what arrived before the end is the reader's"
        assert len(server.peers) == 1, "a fresh connection's failure is not retried here"


GARBAGE = [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x15\x03\x01\x00\x02\x02\x46", OK + b"a\x00b: c\r\n\r\n",
           OK + b"Content-Length: x\r\n\r\n",
           OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
           OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
           CHUNKED + b"nothex\r\n", CHUNKED + b"-5\r\nhello\r\n",
           CHUNKED + b"2\r\nhello\r\n0\r\n\r\n", OK + b"a: " + b"x" * 100_000 + b"\r\n\r\n"]


@pytest.mark.parametrize("raw", GARBAGE, ids=lambda raw: repr(raw[:60]))
async def test_garbage_is_a_failure_of_the_worker(upstream: Upstream, raw: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(raw)
        await peer.until_gone()

    async with scripted(script) as server:
        with pytest.raises(UpstreamFailure) as failure:
            await fetch(upstream, server.url)
        assert failure.value.kind is FailureKind.RESET
        await asyncio.wait_for(server.peers[0].is_gone.wait(), SOON_S)


async def test_an_early_answer_is_heard_while_the_request_is_still_on_its_way(upstream: Upstream) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(sized(b"too large", b"413 Content Too Large"))
        await peer.until_gone()

    async with scripted(script, answers(sized(b"hi"))) as server:
        response = await asyncio.wait_for(upstream.open(post(server.url, b"x" * (32 << 20))), SOON_S)
        assert (response.status, await read_all(response)) == (413, b"too large")
        assert await asyncio.wait_for(fetch(upstream, server.url), SOON_S) == (200, b"hi")
        assert len(server.peers) == 2, "half a request is no place to begin another"


async def test_a_second_response_in_the_same_breath_poisons_nothing(upstream: Upstream) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(sized(b"mine") + sized(b"poison"))
        await peer.until_gone()

    async with scripted(script) as server:
        for number in (1, 2):
            assert await fetch(upstream, server.url) == (200, b"mine")
            assert len(server.peers) == number


async def test_a_kept_connection_that_the_worker_closed_is_passed_over(upstream: Upstream) -> None:
    async with scripted(once(sized(b"hi"))) as server:
        for number in (1, 2, 3):
            assert await fetch(upstream, server.url) == (200, b"hi")
            await asyncio.sleep(0.05)
            assert len(server.peers) == number


async def test_a_slow_reader_slows_the_worker_down(upstream: Upstream) -> None:
    total, sent = 64 << 20, 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(OK + b"Content-Length: %d\r\n\r\n" % total)
        while sent < total:
            await peer.send(b"x" * (1 << 16))
            sent += 1 << 16

    async with scripted(script) as server:
        response = await upstream.open(post(server.url))
        read = len(await response.read_chunk(SOON_S))
        before = -1
        while sent != before:  # until the buffers in between are full
            before = sent
            await asyncio.sleep(0.2)
        assert sent < total // 2
        while chunk := await response.read_chunk(SOON_S):
            read += len(chunk)
        assert read == total


async def test_a_silence_is_reported_and_nothing_is_lost(upstream: Upstream) -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"5\r\nhel")
        await go_on.wait()
        await peer.send(b"lo\r\n0\r\n\r\n")

    async with scripted(script) as server:
        response = await upstream.open(post(server.url))
        assert await response.read_chunk(SOON_S) == b"hel"
        for within_s in (0.02, 0.05, 0.01):
            with pytest.raises(TimeoutError):
                await response.read_chunk(within_s)
        reading = asyncio.ensure_future(response.read_chunk())
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        go_on.set()
        assert await response.read_chunk(SOON_S) == b"lo"
        assert await response.read_chunk(SOON_S) == b""
        response.close()


async def leave_before_the_head(upstream: Upstream, url: str) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await upstream.open(post(url))


async def leave_in_the_body(upstream: Upstream, url: str) -> None:
    response = await upstream.open(post(url))
    assert await response.read_chunk(SOON_S) == b"hello"
    response.close()
    response.close()


async def leave_with_more_to_read(upstream: Upstream, url: str) -> None:
    (await upstream.open(post(url))).close()


@pytest.mark.parametrize(("leave", "said"), [
    (leave_before_the_head, b""), (leave_in_the_body, CHUNKED + b"5\r\nhello\r\n"),
    (leave_with_more_to_read, CHUNKED + b"5\r\nhello\r\n"),
])
async def test_whoever_leaves_takes_the_connection_along(upstream: Upstream, said: bytes,
                                                         leave: Callable[[Upstream, str], Awaitable[None]]) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(said)
        await peer.until_gone()

    async with scripted(script) as server:
        await leave(upstream, server.url)
        await asyncio.wait_for(server.peers[0].is_gone.wait(), SOON_S)


async def test_nobody_listens(upstream: Upstream) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(UpstreamFailure) as failure:
            await upstream.open(post(f"http://127.0.0.1:{unused.getsockname()[1]}/"))
    assert failure.value.kind is FailureKind.CONNECT
    assert failure.value.detail


async def test_connecting_has_a_limit(upstream: Upstream) -> None:
    with contextlib.ExitStack() as open_sockets:
        full = open_sockets.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # the kernel keeps one more than the backlog says, and drops what comes after
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        with pytest.raises(UpstreamFailure) as failure:
            await asyncio.wait_for(upstream.open(post(f"http://127.0.0.1:{full.getsockname()[1]}/")), SOON_S)
    assert failure.value.kind is FailureKind.CONNECT


@pytest.mark.parametrize("value", ["a\r\nx-evil: 1", "a\nb", "a\rb"])
async def test_a_header_cannot_smuggle_another(upstream: Upstream, value: str) -> None:
    async with scripted(answers(sized(b"hi"))) as server:
        with pytest.raises(ValueError, match=r"(?i)header"):
            await upstream.open(post(server.url, x_y=value))
        assert not any(peer.requests for peer in server.peers)
